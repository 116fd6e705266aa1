#include "relay/request.hpp"

#include "json/values.hpp"

namespace moonpool::relay {

namespace {

constexpr size_t kKeptBytesMax = 16 << 10;

// The first character of an array's first element; 0: it has none.
char first_in(const json::Member& array) {
    size_t first = array.value.find_first_not_of(" \t\r\n", 1);
    return first == std::string_view::npos || array.value[first] == ']' ? 0 : array.value[first];
}

// Whether it begins as an array of arrays of arrays.
bool opens_three(std::string_view array) {
    size_t at = 0;
    for (int depth = 0; depth < 3; ++depth) {
        at = array.find_first_not_of(" \t\r\n", at);
        if (at == std::string_view::npos || array[at++] != '[') return false;
    }
    return true;
}

void empty(std::string& text) {
    text.clear();
    if (text.capacity() > kKeptBytesMax) text.shrink_to_fit();
}

}  // namespace

Kind kind_of_path(std::string_view path) {
    if (path == "/v1/chat/completions") return Kind::kChat;
    if (path == "/v1/completions") return Kind::kCompletions;
    if (path == "/v1/embeddings") return Kind::kEmbeddings;
    if (path == "/generate") return Kind::kGenerate;
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
    if (kind == Kind::kGenerate) {
        if (auto most = json::find_path(body, {"sampling_params", "max_new_tokens"}))
            facts_.max_tokens = json::integer_of(*most);
    }
    return facts_;
}

bool Request::stream_if_read() {
    std::lock_guard lock(mutex_);
    return read_ && facts_.stream;
}

// nullptr: there is none.
const json::Member* Request::prompt() {
    if (!facts().is_object) return nullptr;
    if (kind != Kind::kGenerate) return facts_.object.find("prompt");
    const json::Member* text = facts_.object.find("text");
    return text != nullptr && text->kind != json::Kind::kNull ? text : facts_.object.find("input_ids");
}

std::optional<std::vector<uint32_t>> Request::prompt_tokens() {
    const json::Member* ids_of = prompt();
    std::vector<uint32_t> ids;
    if (ids_of == nullptr || !json::token_ids_of(*ids_of, ids)) return std::nullopt;
    return ids;
}

bool Request::has_text() {
    if (kind != Kind::kChat && kind != Kind::kCompletions && kind != Kind::kGenerate) return false;
    const json::Member* text = prompt();
    if (!facts_.is_object) return false;
    if (text == nullptr || text->kind != json::Kind::kArray) {
        return kind == Kind::kChat || (text != nullptr && text->kind == json::Kind::kString);
    }
    return first_in(*text) == '"';
}

std::optional<std::string> Request::prompt_text() {
    const json::Member* text = prompt();
    if (text == nullptr) return std::nullopt;
    return json::string_of(*text);
}

std::optional<size_t> Request::prompt_count() {
    if (kind != Kind::kCompletions && kind != Kind::kGenerate) return std::nullopt;
    const json::Member* all = prompt();
    bool embeddings = kind == Kind::kGenerate && (all == nullptr || all->kind == json::Kind::kNull);
    if (embeddings && facts_.is_object) all = facts_.object.find("input_embeds");
    if (all == nullptr || all->kind != json::Kind::kArray) return std::nullopt;
    if (embeddings) {
        if (!opens_three(all->value)) return std::nullopt;  // a list of vectors: those of one
    } else if (first_in(*all) != '"' && first_in(*all) != '[') {
        return std::nullopt;  // the ids of one
    }
    std::vector<std::string_view> each;
    json::elements_of(all->value, each);
    return each.size();
}

bool Request::wants_one() {
    if (prompt_count().value_or(1) != 1 || !facts().is_object) return false;
    for (const char* name : {"n", "best_of"}) {
        const json::Member* count = facts_.object.find(name);
        if (count != nullptr && json::integer_of(*count).value_or(1) != 1) return false;
    }
    if (kind != Kind::kGenerate) return true;
    auto count = json::find_path(body, {"sampling_params", "n"});
    return !count || json::integer_of(*count).value_or(1) == 1;
}

bool Request::wants_prompt_logprobs() {
    if (kind != Kind::kGenerate) return false;
    const json::Member* wants = facts().object.find("return_logprob");
    return wants != nullptr && (wants->kind == json::Kind::kTrue || wants->kind == json::Kind::kArray);
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
