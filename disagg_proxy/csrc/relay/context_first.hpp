// TensorRT-LLM's form of prefill and decode apart, the context first: what its context server is asked, and
// what of its answer the generation server gets. Pure.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "json/scanner.hpp"
#include "json/splice.hpp"

namespace moonpool::relay {

inline constexpr std::string_view kContextMember = "disaggregated_params";

// The edits that make of a request the one for a context server. Valid as long as `params` (a JSON value) is.
std::vector<json::Edit> context_edits(std::string_view params);

// params: for the generation server; prompt_ids: of the prompt, "" when it does not tell. finished: the first
// token was the last one, and answer, without what is the servers' own, is the client's.
struct Context {
    std::string params, prompt_ids, answer;
    bool finished = false;
};

// nullopt: this answer hands nothing over.
std::optional<Context> context_of(const json::Object& answer);

}  // namespace moonpool::relay
