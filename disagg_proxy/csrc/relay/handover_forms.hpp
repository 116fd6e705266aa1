// How a prefill engine and the engine that answers work together: one row for each form. Names of engines'
// protocols stand here, in context_first and in one_shot, nowhere else in the relay. Pure.
//
//                      prefill is asked            the answering engine is asked
//     two-step         first, one token            with kv_transfer_params of prefill's answer
//     concurrent       one token                   at once, with kv_transfer_params of the plan
//     one-shot         the same body, in a room    at once, with the same room
//     context-first    first, its context          with disaggregated_params of prefill's answer
//     generation-first its context                 at once, with the members of the plan
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "json/scanner.hpp"
#include "json/splice.hpp"
#include "relay/context_first.hpp"
#include "relay/request.hpp"

namespace moonpool::relay {

struct HandoverForm {
    using Edits = std::vector<json::Edit> (*)(const Plan& plan);

    Form form;
    Edits prefill_edits;  // valid as long as the plan is, as those below
    // At once: what the answering engine gets. Null: it waits for what `take` finds in prefill's answer.
    Edits answer_edits;
    // nullopt: prefill's answer hands nothing over. Null: no engine waits for that.
    std::optional<Context> (*take)(const json::Object& answer);
    std::string_view member;  // in which the answering engine gets it
    // Both engines get one body and meet in a room: prefill's answer is of no interest but for the prompt's
    // logprobs.
    bool in_a_room = false;

    bool at_once() const { return answer_edits != nullptr; }
};

const HandoverForm& handover_form(Form form);

// The edits that make of a request the one for a prefill engine of vLLM's protocol (docs/proxy.md): one
// token, no stream, and kv_transfer_params as given (a JSON value). Valid as long as `kv_transfer_params` is.
std::vector<json::Edit> prefill_edits(std::string_view kv_transfer_params);

// The edits with the switches of the request (Request::switches) in their kv_transfer_params, beside all that
// a hand-over says there. params: holds that value as long as the edits are used.
void add_switches(std::vector<json::Edit>& edits, const Request& request, std::string& params);

}  // namespace moonpool::relay
