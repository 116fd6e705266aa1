#include "relay/context_first.hpp"

#include "json/values.hpp"

namespace moonpool::relay {

namespace {

constexpr std::string_view kIds = "prompt_token_ids";

}  // namespace

std::vector<json::Edit> context_edits(std::string_view params) {
    return {{json::Edit::kSet, kContextMember, params},
            {json::Edit::kSet, "stream", "false"},
            {json::Edit::kDrop, "stream_options"}};
}

std::optional<Context> context_of(const json::Object& answer) {
    const json::Member* choices = answer.find("choices");
    std::vector<std::string_view> each;
    if (choices == nullptr || !json::elements_of(choices->value, each) || each.size() != 1) return {};
    json::Object choice, params;
    if (!choice.scan(each[0])) return {};
    const json::Member* given = choice.find(kContextMember);
    if (given == nullptr || !params.scan(given->value)) return {};

    Context context;
    json::Splice splice;
    const json::Edit type{json::Edit::kSet, "request_type", "\"generation_only\""};
    splice.make(params, std::span(&type, 1));
    context.params = splice.joined();
    const json::Member* ids = answer.find(kIds);
    if (ids != nullptr && ids->kind == json::Kind::kArray) context.prompt_ids = ids->value;

    const json::Member* reason = choice.find("finish_reason");
    std::string why = reason == nullptr ? "" : json::string_of(*reason).value_or("");
    context.finished = !why.empty() && why != "length" && why != "not_finished";
    if (!context.finished) return context;
    const json::Edit own{json::Edit::kDrop, kContextMember, {}};
    splice.make(choice, std::span(&own, 1));
    const std::string list = "[" + splice.joined() + "]";
    const json::Edit edits[] = {{json::Edit::kSet, "choices", list}, {json::Edit::kDrop, kIds, {}}};
    splice.make(answer, edits);
    context.answer = splice.joined();
    return context;
}

}  // namespace moonpool::relay
