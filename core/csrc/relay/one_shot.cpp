#include "relay/one_shot.hpp"

#include <algorithm>
#include <array>
#include <vector>

#include "json/splice.hpp"
#include "json/values.hpp"

namespace moonpool::relay {

namespace {

constexpr std::string_view kMeta = "meta_info";
constexpr std::array<std::string_view, 3> kOfPrompt = {"input_token_logprobs", "input_top_logprobs",
                                                       "input_token_ids_logprobs"};
constexpr std::string_view kData = "data:";
constexpr std::string_view kBlanks = " \t\r\n";

std::string_view inside(std::string_view array) {
    array = array.substr(1, array.size() - 2);
    return array.find_first_not_of(kBlanks) == std::string_view::npos ? std::string_view() : array;
}

// Two arrays, one behind the other.
std::string joined(std::string_view first, std::string_view second) {
    first = inside(first);
    second = inside(second);
    std::string out = "[";
    out.append(first).append(first.empty() || second.empty() ? "" : ",").append(second).append("]");
    return out;
}

std::string merged(std::string_view decode, std::string_view prefill) {
    json::Object answer, meta, meta_of_prefill;
    auto from = json::find_path(prefill, {kMeta});
    if (!from || !meta_of_prefill.scan(from->value) || !answer.scan(decode)) return std::string(decode);
    const json::Member* to = answer.find(kMeta);
    if (to == nullptr || !meta.scan(to->value)) return std::string(decode);
    std::array<std::string, kOfPrompt.size()> values;
    std::vector<json::Edit> edits;
    for (size_t i = 0; i < kOfPrompt.size(); ++i) {
        const json::Member* first = meta_of_prefill.find(kOfPrompt[i]);
        const json::Member* second = meta.find(kOfPrompt[i]);
        if (first == nullptr || first->kind != json::Kind::kArray) continue;
        if (second == nullptr || second->kind != json::Kind::kArray) continue;
        values[i] = joined(first->value, second->value);
        edits.push_back({json::Edit::kSet, kOfPrompt[i], values[i]});
    }
    json::Splice splice;
    splice.make(meta, edits);
    const std::string whole = splice.joined();
    const json::Edit edit{json::Edit::kSet, kMeta, whole};
    splice.make(answer, std::span(&edit, 1));
    return splice.joined();
}

// Of a stream the events of a batch tell which of its prompts they are of.
std::string_view index_of(std::string_view event) {
    auto index = json::find_path(event, {"index"});
    return index ? index->value : std::string_view();
}

std::string_view event_like(std::string_view decode, std::string_view stream) {
    std::string_view index = index_of(decode);
    while (!stream.empty()) {
        std::string_view event = next_event(stream);
        if (event.empty() || index_of(event) == index) return event;
    }
    return {};
}

}  // namespace

std::string_view next_event(std::string_view& stream) {
    size_t end = stream.find("\n\n");
    if (end == std::string_view::npos) return {};
    std::string_view event = stream.substr(0, end);
    stream.remove_prefix(end + 2);
    if (event.starts_with(kData)) event.remove_prefix(kData.size());
    event.remove_prefix(std::min(event.find_first_not_of(kBlanks), event.size()));
    return event;
}

int status_of_answer(int status, std::string_view answer) {
    if (!answer.starts_with(kData)) return status;
    std::string_view event = next_event(answer);
    auto error = json::find_path(event, {"error"});
    if (!error || error->kind != json::Kind::kObject) return status;
    auto code = json::find_path(error->value, {"code"});
    auto number = code ? json::integer_of(*code) : std::nullopt;
    return number && *number >= 400 && *number <= 599 ? static_cast<int>(*number) : 500;
}

std::string with_prompt_logprobs(std::string_view decode, std::string_view prefill) {
    if (prefill.starts_with(kData)) return merged(decode, event_like(decode, prefill));
    std::vector<std::string_view> answers, of_prefill;
    if (!json::elements_of(decode, answers)) return merged(decode, prefill);
    if (!json::elements_of(prefill, of_prefill) || of_prefill.size() != answers.size()) {
        return std::string(decode);
    }
    std::string out = "[";
    for (size_t i = 0; i < answers.size(); ++i) {
        if (i > 0) out += ',';
        out += merged(answers[i], of_prefill[i]);
    }
    return out += ']';
}

}  // namespace moonpool::relay
