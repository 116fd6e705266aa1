#include "relay/handover_forms.hpp"

#include <algorithm>
#include <array>

namespace moonpool::relay {

namespace {

using json::Edit;

constexpr std::string_view kParameters = "kv_transfer_params";
constexpr std::string_view kOurs = "moonpool";  // of these, what Moonpool's connectors alone read
// The parameters with which a NIXL-style connector computes a prompt for another engine.
constexpr std::string_view kPrefillParameters =
    R"({"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,)"
    R"("remote_block_ids":null,"remote_host":null,"remote_port":null})";
std::vector<Edit> two_step_prefill(const Plan&) { return prefill_edits(kPrefillParameters); }
std::vector<Edit> planned_prefill(const Plan& plan) { return prefill_edits(plan.prefill_params); }
std::vector<Edit> planned_context(const Plan& plan) { return context_edits(plan.prefill_params); }

std::vector<Edit> members(const Plan& plan) {
    std::vector<Edit> edits;
    for (const auto& [name, value] : plan.members) edits.push_back({Edit::kSet, name, value});
    return edits;
}

std::vector<Edit> members_and_parameters(const Plan& plan) {
    std::vector<Edit> edits = members(plan);
    edits.push_back({Edit::kSet, kParameters, plan.engine_params});
    return edits;
}

std::optional<Context> parameters_of(const json::Object& answer) {
    const json::Member* parameters = answer.find(kParameters);
    if (parameters == nullptr || parameters->kind != json::Kind::kObject) return std::nullopt;
    Context context;
    context.params = parameters->value;
    return context;
}

constexpr std::array kForms = {
    HandoverForm{Form::kTwoStep, two_step_prefill, nullptr, parameters_of, kParameters},
    HandoverForm{Form::kConcurrent, planned_prefill, members_and_parameters, nullptr, {}},
    HandoverForm{Form::kOneShot, members, members, nullptr, {}, true},
    HandoverForm{Form::kContextFirst, planned_context, nullptr, context_of, kContextMember},
    HandoverForm{Form::kGenerationFirst, planned_context, members, nullptr, {}},
};

}  // namespace

const HandoverForm& handover_form(Form form) {
    for (const HandoverForm& row : kForms) {
        if (row.form == form) return row;
    }
    return kForms.front();
}

std::vector<Edit> prefill_edits(std::string_view kv_transfer_params) {
    return {{Edit::kSet, kParameters, kv_transfer_params},
            {Edit::kSet, "stream", "false"},
            {Edit::kSet, "max_tokens", "1"},
            {Edit::kSetWherePresent, "max_completion_tokens", "1"},
            {Edit::kDrop, "stream_options"},
            {Edit::kDrop, "min_tokens"}};
}

void add_switches(std::vector<Edit>& edits, const Request& request, std::string& params) {
    if (request.switches.empty()) return;
    auto own = std::ranges::find(edits, kParameters, &Edit::key);
    if (own == edits.end()) own = edits.insert(own, Edit{Edit::kSet, kParameters, "{}"});
    json::Object outer, inner;
    if (!outer.scan(own->value)) outer.scan("{}");
    const json::Member* ours = outer.find(kOurs);
    if (ours == nullptr || !inner.scan(ours->value)) inner.scan("{}");
    std::vector<Edit> each;
    for (const auto& [name, value] : request.switches) each.push_back({Edit::kSet, name, value});
    json::Splice splice;
    splice.make(inner, each);
    const std::string merged = splice.joined();
    const Edit whole[] = {{Edit::kSet, kOurs, merged}};
    splice.make(outer, whole);
    own->value = params = splice.joined();
}

}  // namespace moonpool::relay
