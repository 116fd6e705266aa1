// libFuzzer: what the proxy parses, without sockets. The first byte chooses the parser and how the rest is
// cut.
//
// Checked: one piece or many gives the same; what is written anew is read as the same; a JSON text that was
// edited scans, and what scans in one place of memory scans in another. Everything else is the sanitizers'
// business.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "http/head_writer.hpp"
#include "json/splice.hpp"
#include "json/values.hpp"

using namespace moonpool;

namespace {

void check(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "fuzz_parsers: %s\n", what);
    std::abort();
}

// Bytes with nothing behind them, so that a read beyond the end is found.
struct Bytes {
    explicit Bytes(std::string_view from) : size(from.size()), data(new char[from.size()]) {
        from.copy(data.get(), from.size());
    }
    std::string_view view() const { return {data.get(), size}; }
    size_t size;
    std::unique_ptr<char[]> data;
};

std::string written(http::RequestParser& parser) {
    std::string out;
    http::write_request_head(out, parser.head(), "h", "id", 0);
    return out;
}

std::string written(http::ResponseParser& parser) {
    std::string out;
    http::write_response_head(out, parser.head(), {}, false, false);
    return out;
}

// Fed in pieces of `step`, each time from elsewhere; the body with it.
template <class Parser>
std::string outcome(Parser parser, std::string_view data, size_t step) {
    http::Step state = http::Step::kMore;
    for (size_t size = 0; state == http::Step::kMore && size < data.size();) {
        size = std::min(data.size(), size + step);
        Bytes bytes(data.substr(0, size));
        state = parser.parse(bytes.view());
        if (state == http::Step::kDone) parser.head().move_views(bytes.data.get(), data.data());
    }
    if (state == http::Step::kMore) return "more";
    if (state == http::Step::kRefused) return "refused: " + parser.refusal().sentence;
    std::string out = written(parser);
    http::BodyReader reader(parser.head().framing, parser.head().content_length);
    for (size_t at = parser.head().bytes; at < data.size() && !reader.done() && !reader.failed(); at += step)
        out += reader.pass(data.substr(at, step));
    if (reader.failed()) return out + reader.why();
    return out + (reader.between_events() ? "between" : "") + (reader.done() ? "done" : "");
}

void fuzz_request(std::string_view data, size_t step) {
    std::string whole = outcome(http::RequestParser(), data, data.size() + 1);
    check(outcome(http::RequestParser(), data, step) == whole, "a request in pieces is another one");
    http::RequestParser parser;
    if (parser.parse(data) != http::Step::kDone) return;
    std::string head = written(parser);
    http::RequestParser again;
    check(again.parse(head) == http::Step::kDone, "a head that was written is refused");
    check(again.head().bytes == head.size(), "a head that was written ends elsewhere");
    check(again.head().target == parser.head().target, "a target changed");
    check(written(again) == head, "a head that was written twice is another one");
}

void fuzz_response(std::string_view data, size_t step) {
    http::ResponseParser parser;
    parser.begin((step & 1) != 0);
    std::string whole = outcome(parser, data, data.size() + 1);
    check(outcome(parser, data, step) == whole, "an answer in pieces is another one");
}

void fuzz_json(std::string_view data) {
    Bytes bytes(data);
    json::Object object;
    if (!object.scan(bytes.view())) return;
    std::vector<uint32_t> ids;
    for (const json::Member& member : object.members()) {
        (void)json::integer_of(member);
        (void)json::string_of(member);
        (void)json::token_ids_of(member, ids);
        json::Object inner;
        if (member.kind == json::Kind::kObject) check(inner.scan(member.value), "a value does not scan");
    }
    using json::Edit;
    const std::vector<Edit> edits{{Edit::kSet, "kv_transfer_params", "{}"},
                                  {Edit::kSet, "stream", "false"},
                                  {Edit::kSetWherePresent, "max_completion_tokens", "1"},
                                  {Edit::kDrop, "min_tokens"}};
    json::Splice splice;
    splice.make(object, edits);
    json::Object edited;
    std::string joined = splice.joined();
    check(edited.scan(joined), "an edited object does not scan");
    check(edited.find("stream") != nullptr && edited.find("stream")->value == "false", "an edit is lost");
    check(edited.find("min_tokens") == nullptr, "a dropped member stands");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) return 0;
    std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
    size_t step = data[0] / 3u % 16 + 1;
    if (data[0] % 3 == 0) fuzz_request(rest, step);
    if (data[0] % 3 == 1) fuzz_response(rest, step);
    if (data[0] % 3 == 2) fuzz_json(rest);
    return 0;
}
