#include "relay/request.hpp"

#include <algorithm>

#include "base/sha256.hpp"
#include "json/splice.hpp"
#include "json/values.hpp"
#include "relay/reserved_members.hpp"

namespace moonpool::relay {

namespace {

constexpr size_t kTextBytesKept = 16 << 10;
constexpr std::string_view kSalt = "cache_salt";  // of a request in every API of engines

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

Digest sha256_of(std::string_view first, std::string_view second) {
    Sha256 hash;
    hash.update(first.data(), first.size());
    hash.update(second.data(), second.size());
    return hash.finish();
}

std::string hexadecimal(const Digest& digest) {
    constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    for (uint8_t octet : digest) {
        text += kDigits[octet >> 4];
        text += kDigits[octet & 15];
    }
    return text;
}

void empty(std::string& text) {
    text.clear();
    if (text.capacity() > kTextBytesKept) text.shrink_to_fit();
}

}  // namespace

Kind kind_of_path(std::string_view path) {
    if (path == "/v1/chat/completions") return Kind::kChat;
    if (path == "/v1/completions") return Kind::kCompletions;
    if (path == "/v1/embeddings") return Kind::kEmbeddings;
    if (path == "/generate") return Kind::kGenerate;
    return Kind::kOther;
}

std::optional<http::Refusal> Request::examine(const BodyLimits& limits, bool form) {
    if (body.empty()) return std::nullopt;
    if (form) {
        const http::Field* type = http::find_field(head.fields, "content-type");
        constexpr std::string_view kForm = "multipart/form-data";
        if (type != nullptr && http::same_name(type->value.substr(0, kForm.size()), kForm)) {
            return std::nullopt;
        }
    }
    if (auto refusal = scan(limits)) return refusal;
    if (auto clean = without_reserved(facts_.object, limits.members_max)) {
        facts_.reserved = true;
        body = std::move(*clean);
        if (auto refusal = scan(limits)) return refusal;
    }
    if (!salt.empty()) {
        if (auto refusal = set_salt()) return refusal;
        if (auto refusal = scan(limits)) return refusal;
    }
    facts_.is_object = true;
    look_at_members(limits);
    return look_at_prompt(limits);
}

std::optional<http::Refusal> Request::scan(const BodyLimits& limits) {
    if (facts_.object.scan(body, limits.members_max)) return std::nullopt;
    if (facts_.object.has_too_many()) {
        return http::Refusal{
            400, "too_many_members",
            "the body has more than the limit of " + std::to_string(limits.members_max) + " members"};
    }
    return http::Refusal{400, "no_object",
                         "the body is no JSON object in UTF-8, nested " + std::to_string(json::kDepthMax) +
                             " deep at most: " + facts_.object.error() + " at byte " +
                             std::to_string(facts_.object.error_at())};
}

// A client's own salt separates its requests further: with the tenant's it makes one of the same length, as
// SGLang writes cache_salt and extra_key one behind the other.
std::optional<http::Refusal> Request::set_salt() {
    const json::Member* own = facts_.object.find(kSalt);
    std::string value = salt;
    if (own != nullptr && own->kind != json::Kind::kNull) {
        std::optional<std::string> text = json::string_of(*own);
        if (!text) return http::Refusal{400, "salt", "cache_salt is one string, or left out"};
        value = hexadecimal(sha256_of(salt, *text));
    }
    value = '"' + value + '"';
    const json::Edit edits[] = {{json::Edit::kSet, kSalt, value}};
    json::Splice splice;
    splice.make(facts_.object, edits);
    body = splice.joined();
    return std::nullopt;
}

void Request::look_at_members(const BodyLimits& limits) {
    const json::Object& object = facts_.object;
    if (const json::Member* model = object.find("model")) {
        if (auto text = json::string_of(*model)) facts_.model = std::move(*text);
    }
    if (const json::Member* told = object.find(kSalt)) facts_.cache_salt = json::string_of(*told);
    if (const json::Member* stream = object.find("stream")) {
        facts_.stream = json::bool_of(*stream).value_or(false);
    }
    facts_.one = true;
    auto must_be_one = [&](const json::Member* count) {
        if (count != nullptr && json::integer_of(*count).value_or(1) != 1) facts_.one = false;
    };
    for (const char* name : {"n", "best_of"}) must_be_one(object.find(name));
    for (const char* name : {"max_completion_tokens", "max_tokens"}) {
        const json::Member* most = object.find(name);
        if (most != nullptr && !facts_.max_tokens) facts_.max_tokens = json::integer_of(*most);
    }
    const json::Member* params = kind == Kind::kGenerate ? object.find("sampling_params") : nullptr;
    json::Object inner;
    if (params == nullptr || !inner.scan(params->value, limits.members_max)) return;
    if (const json::Member* most = inner.find("max_new_tokens")) {
        facts_.max_tokens = json::integer_of(*most);
    }
    must_be_one(inner.find("n"));
}

// Counts, and refuses what would take too long to look at.
std::optional<http::Refusal> Request::look_at_prompt(const BodyLimits& limits) {
    if (kind != Kind::kCompletions && kind != Kind::kGenerate) return std::nullopt;
    const json::Member* all = prompt();
    bool embeddings = kind == Kind::kGenerate && (all == nullptr || all->kind == json::Kind::kNull);
    if (embeddings) all = facts_.object.find("input_embeds");
    if (all == nullptr || all->kind != json::Kind::kArray) return std::nullopt;
    char first = first_in(*all);
    if (embeddings ? !opens_three(all->value) : first != '"' && first != '[') {
        first = 0;  // the ids, or the vectors, of one
    } else {
        size_t count = json::count_elements(all->value, limits.prompts_max);
        if (count > limits.prompts_max) {
            return http::Refusal{
                400, "too_many_prompts",
                "a request has " + std::to_string(limits.prompts_max) + " prompts at most; send several"};
        }
        facts_.prompts = count;
        if (count != 1) facts_.one = false;
    }
    if (embeddings || first == '"') return std::nullopt;
    // Between ids stand commas, and nothing else has any.
    auto ids = static_cast<size_t>(std::count(all->value.begin(), all->value.end(), ',')) + 1;
    if (ids <= limits.prompt_ids_max) return std::nullopt;
    return http::Refusal{400, "too_many_ids",
                         "a request has " + std::to_string(limits.prompt_ids_max) + " token ids at most"};
}

// nullptr: there is none.
const json::Member* Request::prompt() const {
    if (!facts_.is_object) return nullptr;
    if (kind != Kind::kGenerate) return facts_.object.find("prompt");
    const json::Member* text = facts_.object.find("text");
    return text != nullptr && text->kind != json::Kind::kNull ? text : facts_.object.find("input_ids");
}

std::optional<std::vector<uint32_t>> Request::prompt_tokens() const {
    const json::Member* ids_of = prompt();
    std::vector<uint32_t> ids;
    if (ids_of == nullptr || !json::token_ids_of(*ids_of, ids)) return std::nullopt;
    return ids;
}

bool Request::has_text() const {
    if (kind != Kind::kChat && kind != Kind::kCompletions && kind != Kind::kGenerate) return false;
    const json::Member* text = prompt();
    if (!facts_.is_object) return false;
    if (text == nullptr || text->kind != json::Kind::kArray) {
        return kind == Kind::kChat || (text != nullptr && text->kind == json::Kind::kString);
    }
    return first_in(*text) == '"';
}

std::optional<std::string> Request::prompt_text() const {
    const json::Member* text = prompt();
    if (text == nullptr) return std::nullopt;
    return json::string_of(*text);
}

bool Request::wants_prompt_logprobs() const {
    if (kind != Kind::kGenerate) return false;
    const json::Member* wants = facts_.object.find("return_logprob");
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
    salt.clear();
    switches.clear();
    trace = Trace();
    gone = false;
    facts_.object.clear();
    facts_.is_object = facts_.stream = facts_.one = facts_.reserved = false;
    empty(facts_.model);
    facts_.max_tokens.reset();
    facts_.cache_salt.reset();
    facts_.prompts.reset();
}

}  // namespace moonpool::relay
