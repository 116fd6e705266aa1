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

// Of a stream the events of a batch tell which of its prompts they are of.
std::string_view index_of(std::string_view event) {
    auto index = json::find_path(event, {"index"});
    return index ? index->value : std::string_view();
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

PromptLogprobs::Texts PromptLogprobs::texts_of(std::string_view answer) {
    Texts texts;
    json::Object meta;
    auto from = json::find_path(answer, {kMeta});
    if (!from || !meta.scan(from->value)) return texts;
    for (size_t i = 0; i < kOfPrompt.size(); ++i) {
        const json::Member* found = meta.find(kOfPrompt[i]);
        if (found != nullptr && found->kind == json::Kind::kArray) texts.of[i] = inside(found->value);
    }
    return texts;
}

PromptLogprobs::PromptLogprobs(std::string_view prefill) {
    stream_ = prefill.starts_with(kData);
    if (stream_) {  // the first event of each prompt has them all
        for (auto event = next_event(prefill); !event.empty(); event = next_event(prefill)) {
            std::string_view index = index_of(event);
            if (!of_index_.contains(index)) of_index_.emplace(index, texts_of(event));
        }
        return;
    }
    std::vector<std::string_view> answers;
    batch_ = json::elements_of(prefill, answers);
    if (!batch_) answers.assign(1, prefill);
    for (std::string_view answer : answers) each_.push_back(texts_of(answer));
}

std::string PromptLogprobs::Texts::put_into(std::string_view decode) const {
    json::Object answer, meta;
    bool any = std::any_of(of.begin(), of.end(), [](const auto& text) { return text.has_value(); });
    if (!any || !answer.scan(decode)) return std::string(decode);
    const json::Member* to = answer.find(kMeta);
    if (to == nullptr || !meta.scan(to->value)) return std::string(decode);
    std::array<std::string, kOfPrompt.size()> values;
    std::vector<json::Edit> edits;
    for (size_t i = 0; i < kOfPrompt.size(); ++i) {
        const json::Member* second = meta.find(kOfPrompt[i]);
        if (!of[i] || second == nullptr || second->kind != json::Kind::kArray) continue;
        std::string_view first = *of[i], last = inside(second->value);
        const char* comma = first.empty() || last.empty() ? "" : ",";
        values[i].append("[").append(first).append(comma).append(last).append("]");
        edits.push_back({json::Edit::kSet, kOfPrompt[i], values[i]});
    }
    json::Splice splice;
    splice.make(meta, edits);
    const std::string whole = splice.joined();
    const json::Edit edit{json::Edit::kSet, kMeta, whole};
    splice.make(answer, std::span(&edit, 1));
    return splice.joined();
}

std::string PromptLogprobs::put_into(std::string_view decode) const {
    if (stream_) {
        bool one = of_index_.size() == 1 && of_index_.begin()->first.empty();
        auto found = of_index_.find(one ? std::string_view() : index_of(decode));
        return found == of_index_.end() ? std::string(decode) : found->second.put_into(decode);
    }
    std::vector<std::string_view> answers;
    if (!json::elements_of(decode, answers)) {
        return batch_ || each_.empty() ? std::string(decode) : each_[0].put_into(decode);
    }
    if (!batch_ || each_.size() != answers.size()) return std::string(decode);
    std::string out = "[";
    for (size_t i = 0; i < answers.size(); ++i) {
        if (i > 0) out += ',';
        out += each_[i].put_into(answers[i]);
    }
    return out += ']';
}

}  // namespace moonpool::relay
