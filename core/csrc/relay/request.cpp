#include "relay/request.hpp"

#include "json/values.hpp"

namespace moonpool::relay {

namespace {

constexpr size_t kKeptBytesMax = 16 << 10;

void empty(std::string& text) {
    text.clear();
    if (text.capacity() > kKeptBytesMax) text.shrink_to_fit();
}

}  // namespace

Kind kind_of_path(std::string_view path) {
    if (path == "/v1/chat/completions") return Kind::kChat;
    if (path == "/v1/completions") return Kind::kCompletions;
    if (path == "/v1/embeddings") return Kind::kEmbeddings;
    return Kind::kOther;
}

const Request::Facts& Request::facts() {
    std::lock_guard lock(mutex_);
    if (read_) return facts_;
    read_ = true;
    facts_.is_object = !body.empty() && facts_.object.scan(body);
    if (!facts_.is_object) return facts_;
    const json::Member* model = facts_.object.find("model");
    if (model != nullptr) {
        if (auto text = json::string_of(*model)) facts_.model = std::move(*text);
    }
    const json::Member* salt = facts_.object.find("cache_salt");
    if (salt != nullptr) facts_.cache_salt = json::string_of(*salt);
    const json::Member* stream = facts_.object.find("stream");
    if (stream != nullptr) facts_.stream = json::bool_of(*stream).value_or(false);
    for (const char* name : {"max_completion_tokens", "max_tokens"}) {
        const json::Member* most = facts_.object.find(name);
        if (most != nullptr && !facts_.max_tokens) facts_.max_tokens = json::integer_of(*most);
    }
    return facts_;
}

bool Request::stream_if_read() {
    std::lock_guard lock(mutex_);
    return read_ && facts_.stream;
}

std::optional<std::vector<uint32_t>> Request::prompt_tokens() {
    const json::Member* prompt = facts().object.find("prompt");
    std::vector<uint32_t> ids;
    if (!facts_.is_object || prompt == nullptr || !json::token_ids_of(*prompt, ids)) return std::nullopt;
    return ids;
}

bool Request::has_text() {
    if (kind != Kind::kChat && kind != Kind::kCompletions) return false;
    if (!facts().is_object) return false;
    const json::Member* prompt = facts_.object.find("prompt");
    if (prompt == nullptr || prompt->kind != json::Kind::kArray) {
        return kind == Kind::kChat || (prompt != nullptr && prompt->kind == json::Kind::kString);
    }
    size_t first = prompt->value.find_first_not_of(" \t\r\n", 1);
    return first != std::string_view::npos && prompt->value[first] == '"';
}

std::optional<std::string> Request::prompt_text() {
    const json::Member* prompt = facts().object.find("prompt");
    if (!facts_.is_object || prompt == nullptr) return std::nullopt;
    return json::string_of(*prompt);
}

void Request::clear() {
    empty(head_bytes);
    empty(body);
    http::Fields fields = std::move(head.fields);
    fields.clear();
    head = http::RequestHead();
    head.fields = std::move(fields);
    id = 0;
    request_id.clear();
    traceparent.clear();
    trace = Trace();
    gone = false;
    read_ = false;
    facts_.is_object = false;
    facts_.model.clear();
    facts_.stream = false;
    facts_.max_tokens.reset();
    facts_.cache_salt.reset();
}

}  // namespace moonpool::relay
