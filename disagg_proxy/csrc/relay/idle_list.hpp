// IdleList: connections on which nothing is under way, the one that has waited longest first. A connection
// takes itself out when it ends.
#pragma once

#include <cstddef>

namespace moonpool::relay {

class IdleList {
   public:
    class Hook {
       public:
        Hook() = default;
        Hook(const Hook&) = delete;
        ~Hook() { leave(); }

        void leave() {
            if (list_ == nullptr) return;
            (previous_ == nullptr ? list_->first_ : previous_->next_) = next_;
            (next_ == nullptr ? list_->last_ : next_->previous_) = previous_;
            list_ = nullptr;
            previous_ = next_ = nullptr;
        }
        Hook* next() const { return next_; }

       private:
        friend class IdleList;
        IdleList* list_ = nullptr;
        Hook *previous_ = nullptr, *next_ = nullptr;
    };

    // To the end, from wherever it was.
    void push(Hook& hook) {
        hook.leave();
        hook.list_ = this;
        hook.previous_ = last_;
        (last_ == nullptr ? first_ : last_->next_) = &hook;
        last_ = &hook;
    }
    Hook* first() const { return first_; }

   private:
    Hook *first_ = nullptr, *last_ = nullptr;
};

}  // namespace moonpool::relay
