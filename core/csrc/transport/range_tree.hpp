// RangeTree: ranges of addresses that do not overlap, by address. A tree never changes: with() and without()
// give another one, and the two share all nodes but those on the path to the change. So a thread that has a
// tree looks at it without a lock for as long as it likes, and a change costs O(log n), however many hold the
// old one.
//
// It is a treap: sorted by address, and a heap by a hash of the address, so that its form depends on what is
// in it and not on the order in which it came.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace moonpool::transport {

// T has `address`, `length` and contains(address, bytes); the first two never change in a tree.
template <class T>
class RangeTree {
   public:
    using Item = std::shared_ptr<T>;

    size_t size() const { return size_; }

    // The range that holds all of [address, address + bytes); null: none does.
    const Item* find(uint64_t address, uint64_t bytes) const {
        const Item* before = at_or_before(address);
        return before != nullptr && (*before)->contains(address, bytes) ? before : nullptr;
    }
    // The range that begins there, or null.
    const Item* at(uint64_t address) const {
        const Item* before = at_or_before(address);
        return before != nullptr && (*before)->address == address ? before : nullptr;
    }
    // A range that has a byte of [address, address + bytes), which does not wrap and is not empty; or null.
    const Item* overlapping(uint64_t address, uint64_t bytes) const {
        const Item* before = at_or_before(address + bytes - 1);
        bool meets = before != nullptr && (*before)->address + ((*before)->length - 1) >= address;
        return meets ? before : nullptr;
    }

    // item: overlaps none that is in here.
    RangeTree with(Item item) const {
        uint64_t address = item->address;
        Node fresh{address, hash(address), std::move(item), nullptr, nullptr};
        return RangeTree(insert(root_, std::move(fresh)), size_ + 1);
    }
    // Without the range that begins there.
    RangeTree without(uint64_t address) const {
        return at(address) == nullptr ? *this : RangeTree(remove(root_, address), size_ - 1);
    }

    // By ascending address.
    std::vector<Item> list() const {
        std::vector<Item> all;
        all.reserve(size_);
        gather(root_.get(), all);
        return all;
    }

    // Nodes on the longest path: a change copies as many at most.
    size_t depth() const { return depth_of(root_.get()); }

    RangeTree() = default;

   private:
    struct Node;
    using Ref = std::shared_ptr<const Node>;
    struct Node {
        uint64_t address;
        uint64_t priority;
        Item item;
        Ref left, right;
    };

    RangeTree(Ref root, size_t size) : root_(std::move(root)), size_(size) {}

    // SplitMix64's last step: neighbouring addresses get unlike priorities.
    static uint64_t hash(uint64_t x) {
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
        return x ^ (x >> 31);
    }
    static Ref make(Node&& node) { return std::make_shared<const Node>(std::move(node)); }
    // As that node, above others.
    static Ref make(const Node& node, Ref left, Ref right) {
        return make({node.address, node.priority, node.item, std::move(left), std::move(right)});
    }

    const Item* at_or_before(uint64_t address) const {
        const Node* best = nullptr;
        for (const Node* node = root_.get(); node != nullptr;) {
            if (node->address > address) {
                node = node->left.get();
            } else {
                best = node;
                node = node->right.get();
            }
        }
        return best == nullptr ? nullptr : &best->item;
    }

    static Ref insert(const Ref& at, Node&& fresh) {
        if (at == nullptr || fresh.priority > at->priority) {
            split(at, fresh.address, fresh.left, fresh.right);
            return make(std::move(fresh));
        }
        if (fresh.address < at->address) return make(*at, insert(at->left, std::move(fresh)), at->right);
        return make(*at, at->left, insert(at->right, std::move(fresh)));
    }
    static void split(const Ref& at, uint64_t address, Ref& below, Ref& above) {
        if (at == nullptr) {
            below = above = nullptr;
            return;
        }
        Ref middle;
        if (at->address < address) {
            split(at->right, address, middle, above);
            below = make(*at, at->left, std::move(middle));
        } else {
            split(at->left, address, below, middle);
            above = make(*at, std::move(middle), at->right);
        }
    }
    static Ref remove(const Ref& at, uint64_t address) {
        if (at->address == address) return merge(at->left, at->right);
        if (address < at->address) return make(*at, remove(at->left, address), at->right);
        return make(*at, at->left, remove(at->right, address));
    }
    // All of `below` begins before all of `above`.
    static Ref merge(const Ref& below, const Ref& above) {
        if (below == nullptr) return above;
        if (above == nullptr) return below;
        if (below->priority > above->priority) return make(*below, below->left, merge(below->right, above));
        return make(*above, merge(below, above->left), above->right);
    }
    static size_t depth_of(const Node* at) {
        return at == nullptr ? 0 : 1 + std::max(depth_of(at->left.get()), depth_of(at->right.get()));
    }
    static void gather(const Node* at, std::vector<Item>& all) {
        for (; at != nullptr; at = at->right.get()) {
            gather(at->left.get(), all);
            all.push_back(at->item);
        }
    }

    Ref root_;
    size_t size_ = 0;
};

}  // namespace moonpool::transport
