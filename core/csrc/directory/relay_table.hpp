// RelayTable: the questions that a node has passed to its master and that are not answered yet: whose each
// is, and how long its client waits. Bounded, for one client and for all together. Pure: times are the
// caller's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/result.hpp"
#include "wire/frame.hpp"

namespace moonpool {

struct RelayLimits {
    uint32_t client_questions = 64;
    uint64_t client_bytes = 16u << 20;
    uint32_t questions = 8192;
    uint64_t bytes = 64u << 20;
};

class RelayTable {
   public:
    using ClientId = uint64_t;
    struct Asked {
        ClientId client = 0;
        uint64_t request_id = 0;  // as the client numbers its questions
        Kind kind = Kind::kError;
    };

    explicit RelayTable(RelayLimits limits = {}) : limits_(limits) {}

    // Why one more question of so many bytes is not passed on; nothing: it may be.
    std::optional<Error> refusal(ClientId client, uint64_t bytes) const {
        auto it = clients_.find(client);
        Load own = it == clients_.end() ? Load{} : it->second;
        if (own.questions >= limits_.client_questions || own.bytes + bytes > limits_.client_bytes) {
            return Error{Code::kTooLarge, "this process has " + std::to_string(own.questions) +
                                              " questions to the master under way; ask again when they are "
                                              "answered"};
        }
        if (rows_.size() >= limits_.questions || bytes_ + bytes > limits_.bytes) {
            return Error{Code::kTooLarge, "the processes of this host have " + std::to_string(rows_.size()) +
                                              " questions to the master under way; ask again when they are "
                                              "answered"};
        }
        return std::nullopt;
    }

    // -> its number, by which the master is asked.
    uint64_t ask(uint64_t now_ms, const Asked& asked, uint64_t bytes, uint32_t wait_ms) {
        Load& own = clients_[asked.client];
        own.questions += 1;
        own.bytes += bytes;
        bytes_ += bytes;
        rows_.emplace(next_, Row{asked, bytes, now_ms, now_ms + wait_ms, true});
        return next_++;
    }

    // A number for a question of the node's own.
    uint64_t take_number() { return next_++; }

    // The question with that number, which is answered. No `asked`: its client waits no longer.
    struct Answered {
        std::optional<Asked> asked;
        Kind kind;
    };
    std::optional<Answered> answered(uint64_t number) {  // nothing: there is no such question
        auto it = rows_.find(number);
        if (it == rows_.end()) return std::nullopt;
        Row row = it->second;
        rows_.erase(it);
        bytes_ -= row.bytes;
        if (!row.waited_for) return Answered{std::nullopt, row.asked.kind};
        give_back(row);
        return Answered{row.asked, row.asked.kind};
    }

    // Those whose time is up. Their answers are dropped when they come.
    std::vector<Asked> expire(uint64_t now_ms) {
        std::vector<Asked> late;
        for (auto& [number, row] : rows_) {
            if (!row.waited_for || now_ms < row.until_ms) continue;
            row.waited_for = false;
            give_back(row);
            late.push_back(row.asked);
        }
        return late;
    }

    void end(ClientId client) {
        for (auto& [number, row] : rows_) {
            if (row.asked.client == client) row.waited_for = false;
        }
        clients_.erase(client);
    }

    // When the one was asked that waits the longest for its answer.
    std::optional<uint64_t> oldest_ms() const {
        if (rows_.empty()) return std::nullopt;
        return rows_.begin()->second.asked_ms;
    }

    // The most that a client waits for one of them, from when it asked.
    uint64_t longest_wait_ms() const {
        uint64_t longest_ms = 0;
        for (const auto& [number, row] : rows_) {
            if (row.waited_for) longest_ms = std::max(longest_ms, row.until_ms - row.asked_ms);
        }
        return longest_ms;
    }

    // The connection that all were asked on has ended. Numbers go on: none is given twice.
    void clear() {
        rows_.clear();
        clients_.clear();
        bytes_ = 0;
    }

    size_t size() const { return rows_.size(); }
    uint64_t bytes() const { return bytes_; }

   private:
    struct Load {
        uint32_t questions = 0;
        uint64_t bytes = 0;
    };
    struct Row {
        Asked asked;
        uint64_t bytes = 0;
        uint64_t asked_ms = 0, until_ms = 0;
        bool waited_for = true;
    };

    void give_back(const Row& row) {
        auto it = clients_.find(row.asked.client);
        if (it == clients_.end()) return;
        it->second.questions -= 1;
        it->second.bytes -= row.bytes;
        if (it->second.questions == 0) clients_.erase(it);
    }

    RelayLimits limits_;
    uint64_t next_ = 1;
    uint64_t bytes_ = 0;
    std::map<uint64_t, Row> rows_;  // by number: the first was asked first
    std::unordered_map<ClientId, Load> clients_;
};

}  // namespace moonpool
