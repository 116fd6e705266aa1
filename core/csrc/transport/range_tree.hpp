// RangeTree: ranges of addresses that do not overlap, by address. A copy of a tree shares its nodes, and
// costs one reference. A change of a tree copies the nodes on the path to it that another tree has, too, and
// changes those that are its own in place. So a thread that has a copy looks at it without a lock for as long
// as it likes, a change costs O(log n), however many hold an old copy, and where none does it allocates one
// node.
//
// It is a treap: sorted by address, and a heap by a hash of the address, so that its form depends on what is
// in it and not on the order in which it came.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace moonpool::transport {

// Whether this is the only reference; no other thread may make one meanwhile. What a thread has read that
// dropped the last other one comes before what is written now.
template <class T>
bool is_only(const std::shared_ptr<T>& ref) {
    if (ref.use_count() != 1) return false;
#if defined(__SANITIZE_THREAD__)
    (void)std::shared_ptr<T>(ref);  // TSan sees no fences; to count up acquires, too
#endif
    std::atomic_thread_fence(std::memory_order_acquire);
    return true;
}

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
    void add(Item item) {
        uint64_t address = item->address;
        insert(root_, std::make_shared<Node>(address, hash(address), std::move(item), nullptr, nullptr));
        ++size_;
    }
    // The range that begins there, if one does.
    void remove(uint64_t address) {
        if (at(address) == nullptr) return;
        remove(root_, address);
        --size_;
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

   private:
    struct Node;
    using Ref = std::shared_ptr<Node>;
    struct Node {
        uint64_t address;
        uint64_t priority;
        Item item;
        Ref left, right;
    };

    // SplitMix64's last step: neighbouring addresses get unlike priorities.
    static uint64_t hash(uint64_t x) {
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
        return x ^ (x >> 31);
    }
    // The node, made this tree's own. Those above it are already: a copy of a node shares those below it.
    static Node& own(Ref& ref) {
        if (!is_only(ref)) ref = std::make_shared<Node>(*ref);
        return *ref;
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

    static void insert(Ref& at, Ref fresh) {
        if (at == nullptr || fresh->priority > at->priority) {
            split(std::move(at), fresh->address, fresh->left, fresh->right);
            at = std::move(fresh);
            return;
        }
        Node& node = own(at);
        Ref& below = fresh->address < node.address ? node.left : node.right;
        insert(below, std::move(fresh));
    }
    static void split(Ref at, uint64_t address, Ref& below, Ref& above) {
        if (at == nullptr) return;
        Node& node = own(at);
        if (node.address < address) {
            Ref right = std::move(node.right);
            split(std::move(right), address, node.right, above);
            below = std::move(at);
        } else {
            Ref left = std::move(node.left);
            split(std::move(left), address, below, node.left);
            above = std::move(at);
        }
    }
    static void remove(Ref& at, uint64_t address) {
        Node& node = own(at);
        if (node.address == address) {
            at = merge(std::move(node.left), std::move(node.right));
        } else {
            remove(address < node.address ? node.left : node.right, address);
        }
    }
    // All of `below` begins before all of `above`.
    static Ref merge(Ref below, Ref above) {
        if (below == nullptr) return above;
        if (above == nullptr) return below;
        if (below->priority > above->priority) {
            Node& node = own(below);
            node.right = merge(std::move(node.right), std::move(above));
            return below;
        }
        Node& node = own(above);
        node.left = merge(std::move(below), std::move(node.left));
        return above;
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
