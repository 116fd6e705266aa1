// ByNode: one value for each node number that is in use, found without a search; in the order of the numbers.
// Numbers are low (Membership::free_id), so that a place for each of them costs little. Values stay where
// they are while others come and go.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "directory/types.hpp"

namespace moonpool {

template <class T>
class ByNode {
   public:
    using Row = std::pair<const NodeId, T>;

    template <class Of>
    class Iterator {
       public:
        Iterator(const std::vector<std::unique_ptr<Row>>* rows, size_t at) : rows_(rows), at_(at) { skip(); }
        Of& operator*() const { return *(*rows_)[at_]; }
        Of* operator->() const { return (*rows_)[at_].get(); }
        Iterator& operator++() {
            ++at_;
            skip();
            return *this;
        }
        friend bool operator==(const Iterator& a, const Iterator& b) { return a.at_ == b.at_; }

       private:
        void skip() {
            while (at_ < rows_->size() && (*rows_)[at_] == nullptr) ++at_;
        }
        const std::vector<std::unique_ptr<Row>>* rows_;
        size_t at_;
    };

    auto begin() { return Iterator<Row>(&rows_, 0); }
    auto end() { return Iterator<Row>(&rows_, rows_.size()); }
    auto begin() const { return Iterator<const Row>(&rows_, 0); }
    auto end() const { return Iterator<const Row>(&rows_, rows_.size()); }

    size_t size() const { return size_; }
    bool contains(NodeId id) const { return id < rows_.size() && rows_[id] != nullptr; }
    auto find(NodeId id) { return contains(id) ? Iterator<Row>(&rows_, id) : end(); }
    auto find(NodeId id) const { return contains(id) ? Iterator<const Row>(&rows_, id) : end(); }
    T& at(NodeId id) {
        if (!contains(id)) std::abort();
        return rows_[id]->second;
    }
    const T& at(NodeId id) const { return const_cast<ByNode*>(this)->at(id); }

    // In the place of none.
    T& emplace(NodeId id, T value) {
        if (contains(id)) std::abort();
        if (id >= rows_.size()) rows_.resize(size_t{id} + 1);
        rows_[id] = std::make_unique<Row>(id, std::move(value));
        ++size_;
        return rows_[id]->second;
    }
    void erase(NodeId id) {
        if (!contains(id)) return;
        rows_[id] = nullptr;
        --size_;
    }

   private:
    std::vector<std::unique_ptr<Row>> rows_;
    size_t size_ = 0;
};

}  // namespace moonpool
