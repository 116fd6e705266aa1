#include "relay/routes.hpp"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <utility>

namespace moonpool::relay {

namespace {

std::string shown(std::string_view path) {
    std::string text;
    for (char octet : path.substr(0, 100)) {
        if (octet >= 0x20 && octet < 0x7f) {
            text += octet;
        } else {
            char escaped[8];
            std::snprintf(escaped, sizeof(escaped), "\\x%02x", static_cast<unsigned char>(octet));
            text += escaped;
        }
    }
    return path.size() > 100 ? text + "..." : text;
}

Route wrong_method(std::string_view method, std::string_view path, const char* allowed,
                   http::Refusal& refusal) {
    refusal = {405, "method", shown(path) + " takes " + allowed + ", not " + shown(method)};
    return Route::kRefused;
}

bool is_page(std::string_view path) {
    constexpr std::string_view kPages[] = {"/health",  "/livez", "/readyz", "/metrics",
                                           "/engines", "/ui",    "/ui/data"};
    return std::find(std::begin(kPages), std::end(kPages), path) != std::end(kPages);
}

bool is_registry(std::string_view path) {
    return path == "/register" || path == "/unregister" || path == "/query" || path == "/query_by_hash";
}

// Of the OpenAI and the Anthropic API, of vLLM and of SGLang, as far as they compute and change nothing.
constexpr std::string_view kInference[] = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/rerank",
    "/classify",
    "/v1/classify",
    "/pooling",
    "/tokenize",
    "/detokenize",
    "/v1/tokenize",
    "/v1/detokenize",
    "/generate",
};

bool is_inference(std::string_view path) {
    return std::find(std::begin(kInference), std::end(kInference), path) != std::end(kInference);
}

int hex(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    c = static_cast<char>(c | 0x20);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

// Whether a segment is "." or ".." as some server on the way may read it: with escapes resolved, and
// backslashes taken for slashes.
bool has_dot_segment(std::string_view path) {
    size_t dots = 0, others = 0;
    for (size_t i = 0; i <= path.size(); ++i) {
        char octet = i < path.size() ? path[i] : '/';
        if (octet == '%' && i + 2 < path.size() && hex(path[i + 1]) >= 0 && hex(path[i + 2]) >= 0) {
            octet = static_cast<char>(hex(path[i + 1]) * 16 + hex(path[i + 2]));
            i += 2;
        }
        if (octet == '/' || octet == '\\') {
            if (others == 0 && (dots == 1 || dots == 2)) return true;
            dots = others = 0;
        } else {
            ++(octet == '.' ? dots : others);
        }
    }
    return false;
}

}  // namespace

Routes::Routes(bool registry, std::vector<std::string> added)
    : registry_(registry), added_(std::move(added)) {}

bool Routes::is_added(std::string_view path) const {
    return std::any_of(added_.begin(), added_.end(), [&](std::string_view one) {
        if (!one.ends_with("/*")) return path == one;
        one.remove_suffix(1);
        return path.size() > one.size() && path.starts_with(one);
    });
}

Route Routes::find(std::string_view method, std::string_view path, http::Refusal& refusal) const {
    const bool post = method == "POST", read = method == "GET" || method == "HEAD";
    if (is_inference(path)) {
        return post ? Route::kRelay : wrong_method(method, path, "POST", refusal);
    }
    if (has_dot_segment(path)) {
        refusal = {400, "dot_segment", shown(path) + " has a segment of dots; write the path that is meant"};
        return Route::kRefused;
    }
    if (path == "/v1/models" || path.starts_with("/v1/models/")) {
        if (!read) return wrong_method(method, path, "GET, HEAD", refusal);
        return path == "/v1/models" && method == "GET" ? Route::kModels : Route::kRelay;
    }
    if (is_page(path)) {
        return read ? Route::kPage : wrong_method(method, path, "GET, HEAD", refusal);
    }
    if (registry_ && is_registry(path)) {
        return post ? Route::kPage : wrong_method(method, path, "POST", refusal);
    }
    if (is_added(path)) {
        return post || read ? Route::kRelay : wrong_method(method, path, "GET, HEAD, POST", refusal);
    }
    refusal = {404, "unknown_path",
               "this proxy does not relay " + shown(path) +
                   "; its operator can add paths of the engines with proxy.relay_paths"};
    return Route::kRefused;
}

}  // namespace moonpool::relay
