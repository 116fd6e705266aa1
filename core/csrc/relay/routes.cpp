#include "relay/routes.hpp"

#include <cstdio>
#include <string>

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

bool is_registry(std::string_view path) {
    return path == "/register" || path == "/unregister" || path == "/query" || path == "/query_by_hash";
}

}  // namespace

Route route(std::string_view method, std::string_view path, http::Refusal& refusal, bool registry) {
    const bool post = method == "POST", read = method == "GET" || method == "HEAD";
    if (path.starts_with("/v1/")) {
        if (method == "GET" && path == "/v1/models") return Route::kModels;
        return post || read ? Route::kRelay : wrong_method(method, path, "GET, HEAD, POST", refusal);
    }
    if (path == "/tokenize" || path == "/detokenize" || path == "/generate") {
        return post ? Route::kRelay : wrong_method(method, path, "POST", refusal);
    }
    if (path == "/health" || path == "/metrics" || path == "/engines" || path == "/ui" ||
        path == "/ui/data") {
        return read ? Route::kPage : wrong_method(method, path, "GET, HEAD", refusal);
    }
    if (registry && is_registry(path)) {
        return post ? Route::kPage : wrong_method(method, path, "POST", refusal);
    }
    refusal = {404, "unknown_path",
               "there is no " + shown(path) +
                   " here; try /v1/, /generate, /tokenize, /detokenize, /health, /metrics, /engines or /ui"};
    return Route::kRefused;
}

}  // namespace moonpool::relay
