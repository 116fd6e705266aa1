// The pure parts of the relay: breaker, histogram, routes, traces, keys, token counts.
#include <arpa/inet.h>
#include <doctest/doctest.h>

#include <atomic>
#include <cmath>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include "base/sha256.hpp"
#include "json/scanner.hpp"
#include "json/values.hpp"
#include "relay/addresses.hpp"
#include "relay/api_keys.hpp"
#include "relay/breaker.hpp"
#include "relay/client_budget.hpp"
#include "relay/counts.hpp"
#include "relay/idle_list.hpp"
#include "relay/observations.hpp"
#include "relay/request.hpp"
#include "relay/reserved_members.hpp"
#include "relay/routes.hpp"
#include "relay/tokenize_queue.hpp"
#include "relay/trace.hpp"
#include "relay/turns.hpp"
#include "relay/usage.hpp"

using namespace moonpool::relay;
using moonpool::sha256;
namespace json = moonpool::json;

TEST_CASE("a breaker opens after so many failures in a row and closes by one good trial") {
    Breaker breaker({3, 2, 5});
    double now = 100;
    auto ask = [&](Verdict verdict) {
        bool trial = breaker.started(now);
        breaker.finished(verdict, now, trial);
        CHECK(breaker.check_integrity());
        return trial;
    };
    ask(Verdict::kBad);
    ask(Verdict::kBad);
    ask(Verdict::kGood);  // not in a row
    ask(Verdict::kBad);
    ask(Verdict::kBad);
    ask(Verdict::kNone);
    CHECK(breaker.closed());
    ask(Verdict::kBad);
    CHECK_FALSE(breaker.closed());
    for (double rest : {2.0, 4.0, 5.0, 5.0}) {  // twice as long each time, up to the most
        CHECK_FALSE(breaker.allows(now + rest - 0.01));
        CHECK(breaker.rests_until() == now + rest);
        now += rest;
        CHECK(breaker.allows(now));
        CHECK(ask(Verdict::kBad));
    }
    now += 5;
    bool trial = breaker.started(now);
    CHECK(trial);
    CHECK_FALSE(breaker.allows(now));  // one trial at a time
    CHECK(std::isinf(breaker.rests_until()));
    CHECK_FALSE(breaker.started(now));  // when there is no alternative: no second trial
    breaker.finished(Verdict::kBad, now, false);
    breaker.finished(Verdict::kNone, now, trial);  // its client left: the next one is the trial
    CHECK(breaker.allows(now));
    CHECK(ask(Verdict::kGood));
    CHECK(breaker.closed());
    CHECK(breaker.failures() == 0);
    CHECK(breaker.rests_until() == 0);
}

TEST_CASE("a 4xx is an answer") {
    CHECK(verdict_on_status(200) == Verdict::kGood);
    CHECK(verdict_on_status(404) == Verdict::kGood);
    CHECK(verdict_on_status(499) == Verdict::kGood);
    CHECK(verdict_on_status(500) == Verdict::kBad);
}

TEST_CASE("a bound belongs to its bucket") {
    Latencies latencies;
    for (double seconds : {0.0005, 0.001, 0.0011, 599.0, 600.0, 601.0}) latencies.observe(seconds);
    CHECK(latencies.counts().front() == 2);
    CHECK(latencies.counts()[1] == 1);
    CHECK(latencies.counts()[Latencies::kBounds.size() - 1] == 2);
    CHECK(latencies.counts().back() == 1);
    CHECK(latencies.sum_s() == doctest::Approx(0.0005 + 0.001 + 0.0011 + 599 + 600 + 601));
}

TEST_CASE("paths and methods") {
    moonpool::http::Refusal refusal;
    const Routes routes, registry(true), added(false, {"/v1/audio/*", "/v1/extra"});
    auto status = [&](const Routes& of, const char* method, std::string_view path) {
        return of.find(method, path, refusal) == Route::kRefused ? refusal.status : 200;
    };
    CHECK(routes.find("POST", "/v1/chat/completions", refusal) == Route::kRelay);
    CHECK(routes.find("GET", "/v1/models", refusal) == Route::kModels);
    CHECK(routes.find("HEAD", "/v1/models", refusal) == Route::kRelay);
    CHECK(routes.find("GET", "/v1/models/org/name", refusal) == Route::kRelay);
    CHECK(routes.find("HEAD", "/metrics", refusal) == Route::kPage);
    CHECK(routes.find("POST", "/tokenize", refusal) == Route::kRelay);
    for (const char* path : {"/register", "/unregister", "/query", "/query_by_hash"}) {
        CHECK(registry.find("POST", path, refusal) == Route::kPage);
        CHECK(status(registry, "GET", path) == 405);
        CHECK(status(routes, "POST", path) == 404);
    }
    for (auto [method, path, expected] : {std::tuple{"GET", "/", 404},
                                          {"POST", "/v1", 404},
                                          {"POST", "/sleep", 404},
                                          {"POST", "/v1/load_lora_adapter", 404},
                                          {"POST", "/v1/completions/", 404},
                                          {"GET", "*", 404},
                                          {"DELETE", "/v1/models", 405},
                                          {"GET", "/v1/completions", 405},
                                          {"GET", "/tokenize", 405},
                                          {"POST", "/health", 405},
                                          {"POST", "/livez", 405},
                                          {"POST", "/v1/../metrics", 400},
                                          {"GET", "/v1/models/%2E%2e", 400},
                                          {"GET", "/v1/models/..%2Fx", 400},
                                          {"GET", "/v1/models/...", 200},
                                          {"GET", "/v1/models/a.b", 200},
                                          {"GET", "/v1/models/%2", 200}}) {
        CAPTURE(path);
        CHECK(status(routes, method, path) == expected);
    }
    CHECK(status(added, "POST", "/v1/audio/speech") == 200);
    CHECK(status(added, "POST", "/v1/audio/") == 404);
    CHECK(status(added, "GET", "/v1/extra") == 200);
    CHECK(status(added, "POST", "/v1/extra/x") == 404);
    CHECK_FALSE(added.is_added("/v1/completions"));
    CHECK(status(routes, "GET", std::string("/\xff\n") + std::string(200, 'a')) == 404);
    CHECK(refusal.sentence.starts_with("this proxy does not relay /\\xff\\x0aaaa"));
    CHECK(refusal.sentence.size() < 250);
}

TEST_CASE("what clients may not say is taken out, and nothing else") {
    auto cleaned = [](std::string_view body) {
        moonpool::json::Object object;
        REQUIRE(object.scan(body));
        return without_reserved(object, 8).value_or("as it was");
    };
    CHECK(cleaned(R"({})") == "as it was");
    CHECK(cleaned(R"({"a":{"rid":1},"sampling_params":{"n":1}})") == "as it was");
    CHECK(cleaned(R"({"rid":1})") == "{}");
    CHECK(cleaned(R"({"a":1,"\u0072id":1, "b":2,"rid":3})") == R"({"a":1, "b":2})");
    CHECK(cleaned(R"({"vllm_xargs":{"rid":1,"a":2},"b":3})") == R"({"b":3,"vllm_xargs":{"a":2}})");
    CHECK(cleaned(R"({"sampling_params":[{"n":1},{"extra_args":{"rid":1}}]})") ==
          R"({"sampling_params":[{"n":1},{"extra_args":{}}]})");
    // Nested without end, or with more members than are looked at: not looked into, so not told.
    CHECK(cleaned(R"({"extra_body":{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1,"g":1,"h":1,"i":1}})") ==
          R"({"extra_body":{}})");
    std::string deep = R"({"rid":1})";
    for (int i = 0; i < 9; ++i) deep = R"({"extra_body":)" + deep + "}";
    CHECK(cleaned(deep).find("rid") == std::string::npos);
    CHECK(is_reserved_id("x___decode_addr_10.0.0.1:1_y"));
    CHECK_FALSE(is_reserved_id("prefill_addr"));
}

TEST_CASE("addresses are counted by host, and an IPv6 network is one") {
    auto key = [](const char* text) {
        sockaddr_storage peer{};
        auto& four = reinterpret_cast<sockaddr_in&>(peer);
        auto& six = reinterpret_cast<sockaddr_in6&>(peer);
        if (::inet_pton(AF_INET, text, &four.sin_addr) == 1) {
            peer.ss_family = AF_INET;
        } else {
            REQUIRE(::inet_pton(AF_INET6, text, &six.sin6_addr) == 1);
            peer.ss_family = AF_INET6;
        }
        return Addresses::key_of(peer);
    };
    CHECK(key("10.0.0.1") == key("::ffff:10.0.0.1"));
    CHECK(key("10.0.0.1") != key("10.0.0.2"));
    CHECK(key("2001:db8:0:1::1") == key("2001:db8:0:1:ffff::9"));
    CHECK(key("2001:db8:0:1::1") != key("2001:db8:0:2::1"));
    Addresses addresses;
    Held& held = addresses.come(7);
    CHECK(&addresses.come(7) == &held);
    CHECK(held.connections == 2);
    addresses.leave(7);
    addresses.leave(7);
    CHECK(addresses.size() == 0);
}

TEST_CASE("bodies have a budget, each address a share of it, and pages one of their own") {
    using For = ClientBudget::For;
    Limits limits;
    limits.bodies_bytes_max = 800;
    limits.body_bytes_max = 10;
    limits.address_share = 0.5;
    ClientBudget budget(limits);
    Held one, other, third;
    CHECK_FALSE(budget.take_body(For::kEngines, one, 400));
    CHECK(std::string_view(budget.take_body(For::kEngines, one, 1)->reason) == "address_bodies");
    CHECK_FALSE(budget.take_body(For::kEngines, other, 399));
    CHECK(std::string_view(budget.take_body(For::kEngines, third, 2)->reason) == "bodies_held");
    CHECK_FALSE(budget.take_body(For::kPages, third, 50));
    CHECK(std::string_view(budget.take_body(For::kPages, third, 1)->reason) == "address_bodies");
    CHECK(std::string_view(budget.take_body(For::kPages, third, 51)->reason) == "bodies_held");
    CHECK(budget.check_integrity(849, 0));
    budget.give_body(For::kEngines, one, 400);
    CHECK_FALSE(budget.take_body(For::kEngines, one, 1));
    CHECK(one.body_bytes == 1);
    budget.change_unread(0, 7);
    budget.change_unread(7, 3);
    CHECK(budget.check_integrity(450, 3));
    CHECK_FALSE(budget.check_integrity(451, 3));
    CHECK_FALSE(budget.check_integrity(450, 4));
}

TEST_CASE("idle connections stand in the order in which they began to wait") {
    IdleList list, other;
    auto count = [](const IdleList& of) {
        size_t n = 0;
        for (IdleList::Hook* hook = of.first(); hook != nullptr; hook = hook->next()) ++n;
        return n;
    };
    IdleList::Hook a, b;
    {
        IdleList::Hook c;
        for (IdleList::Hook* hook : {&a, &b, &c}) list.push(*hook);
        list.push(a);
        CHECK(list.first() == &b);
        CHECK(b.next() == &c);
        CHECK(c.next() == &a);
    }
    CHECK(b.next() == &a);
    other.push(b);
    b.leave();
    b.leave();
    CHECK(count(list) == 1);
    CHECK(count(other) == 0);
}

TEST_CASE("a traceparent survives, and nothing like it does") {
    const std::string good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    auto trace = parse_traceparent(good);
    REQUIRE(trace.has_value());
    std::string written;
    write_traceparent(*trace, written);
    CHECK(written == good);
    std::string dropped = good.substr(0, good.size() - 2) + "00";  // the client's tracing left it out
    written.clear();
    write_traceparent(parse_traceparent(dropped).value(), written);
    CHECK(written == dropped);
    CHECK(parse_traceparent("01" + good.substr(2) + "-later").has_value());
    for (size_t size = 0; size < good.size(); ++size) CHECK_FALSE(parse_traceparent(good.substr(0, size)));
    for (size_t at = 0; at < good.size(); ++at) {
        std::string changed = good;
        changed[at] = 'x';
        CHECK_FALSE(parse_traceparent(changed).has_value());
    }
}

TEST_CASE("keys") {
    CHECK_FALSE(ApiKeys({}).any());
    ApiKeys keys({{sha256("alpha", 5), "a1"}, {sha256("beta", 4), ""}});
    CHECK(keys.any());
    REQUIRE(keys.find("Bearer alpha") != nullptr);
    CHECK(keys.find("Bearer alpha")->salt == "a1");
    REQUIRE(keys.find("bearer beta") != nullptr);
    CHECK(keys.find("bearer beta")->salt.empty());
    for (const char* shown :
         {"", "Bearer", "Bearer ", "Bearer alph", "Bearer alphaa", "Basic alpha", "alpha"}) {
        CHECK(keys.find(shown) == nullptr);
    }
}

// -> the salt that the engine is told, "" where the request is refused. The facts have to say the same.
std::string told_salt(Kind kind, const char* body, const std::string& salt) {
    Request request;
    request.kind = kind;
    request.body = body;
    request.salt = salt;
    if (request.examine({100, 100, 100}, false)) return "";
    json::Object sent;
    REQUIRE(sent.scan(request.body));
    const json::Member* member = sent.find("cache_salt");
    std::string told = member == nullptr ? "none" : json::string_of(*member).value_or("no string");
    CHECK(request.facts().cache_salt.value_or("none") == told);
    return told;
}

TEST_CASE("the salt of a tenant stands in the place of its clients'") {
    const std::string a(64, 'a'), b(64, 'b');
    CHECK(told_salt(Kind::kChat, R"({"model":"m"})", "") == "none");
    CHECK(told_salt(Kind::kChat, R"({"cache_salt":"mine"})", "") == "mine");
    CHECK(told_salt(Kind::kChat, R"({"model":"m"})", a) == a);
    CHECK(told_salt(Kind::kOther, R"({"cache_salt":null,"model":"m"})", a) == a);
    CHECK(told_salt(Kind::kGenerate, R"({"text":"t"})", a) == a);
    // A client's own goes on to separate, within its tenant.
    std::string own = told_salt(Kind::kChat, R"({"cache_salt":"mine"})", a);
    CHECK(own.size() == a.size());
    CHECK(own != a);
    CHECK(own == told_salt(Kind::kCompletions, R"({"cache_salt":"mine","prompt":"p"})", a));
    CHECK(own != told_salt(Kind::kChat, R"({"cache_salt":"other"})", a));
    CHECK(own != told_salt(Kind::kChat, R"({"cache_salt":"mine"})", b));
    // Another tenant's is not reached by naming it, nor by naming the member twice.
    CHECK(told_salt(Kind::kChat, ("{\"cache_salt\":\"" + a + "\"}").c_str(), b) != a);
    CHECK(told_salt(Kind::kChat, R"({"cache_salt":"x","a":1,"cache_salt":"y"})", b).size() == b.size());
    for (const char* odd : {R"({"cache_salt":5})", R"({"cache_salt":["a"]})", R"({"cache_salt":{}})"}) {
        CHECK(told_salt(Kind::kChat, odd, a).empty());
    }
}

TEST_CASE("what an answer says of its tokens") {
    Usage usage;
    CHECK(find_usage(R"({"usage": {"prompt_tokens": 12, "completion_tokens":3,)"
                     R"("prompt_tokens_details":{"cached_tokens":8}},"x":null})",
                     usage));
    CHECK(usage.prompt == 12);
    CHECK(usage.completion == 3);
    CHECK(usage.cached == 8);
    CHECK(find_usage(R"({"usage":{"prompt_tokens":1,"prompt_tokens_details":null}})", usage));
    CHECK(usage.cached == -1);
    for (const char* text : {"", "{}", R"({"usage":null})", R"({"usage":)", R"({"usage":{"prompt_tokens":1)",
                             R"({"usage")", R"({"usage":{{{)"}) {
        CHECK_FALSE(find_usage(text, usage));
    }
    CHECK(find_usage(R"({"usage":{"prompt_tokens":99999999999999999999,"completion_tokens":-4}})", usage));
    CHECK(usage.prompt == -1);
    CHECK(usage.completion == -1);
}

TEST_CASE("observations are bounded") {
    Observations observations(2);
    for (uint64_t id = 1; id <= 3; ++id) {
        Observation one;
        one.request = id;
        observations.add(one);
    }
    CHECK(observations.dropped() == 1);
    CHECK(observations.take().size() == 2 * sizeof(Observation));
    CHECK(observations.take().empty());
}

TEST_CASE("an answer that comes whole is one observation, a stream two") {
    Observations observations(100);
    auto reached = [&](uint64_t id, Stage stage, bool stream) {
        Observation one;
        one.request = id;
        one.stage = static_cast<uint8_t>(stage);
        one.stream = stream;
        observations.add(one);
    };
    auto taken = [&] { return observations.take().size() / sizeof(Observation); };
    reached(1, Stage::kPrefilled, false);
    reached(1, Stage::kBegun, false);
    reached(1, Stage::kEnded, false);
    CHECK(taken() == 2);
    reached(1, Stage::kBegun, true);
    reached(1, Stage::kEnded, true);
    CHECK(taken() == 2);
    reached(1, Stage::kBegun, false);
    reached(2, Stage::kEnded, false);
    CHECK(taken() == 2);
    reached(1, Stage::kBegun, false);
    CHECK(taken() == 1);
    reached(1, Stage::kEnded, false);
    CHECK(taken() == 1);
}

namespace {

Question asking(Kind kind, const char* body) {
    auto request = std::make_shared<Request>();
    request->kind = kind;
    request->body = body;
    request->examine({.members_max = 1024, .prompts_max = 4096, .prompt_ids_max = 1 << 20}, false);
    return Question{std::move(request), {}, 0, false, {}};
}

}  // namespace

TEST_CASE("text is what a tokenizer would be asked about") {
    auto has = [](Kind kind, const char* body) { return asking(kind, body).request->has_text(); };
    CHECK(has(Kind::kChat, R"({"messages":[]})"));
    CHECK(has(Kind::kCompletions, R"({"prompt":"x"})"));
    CHECK(has(Kind::kCompletions, R"({"prompt":[ "x"]})"));
    CHECK_FALSE(has(Kind::kCompletions, R"({"prompt":[1,2]})"));
    CHECK_FALSE(has(Kind::kCompletions, R"({"prompt":[[1,2]]})"));
    CHECK_FALSE(has(Kind::kCompletions, R"({"prompt":[]})"));
    CHECK_FALSE(has(Kind::kCompletions, R"({"prompt":7})"));
    CHECK_FALSE(has(Kind::kCompletions, R"({})"));
    CHECK_FALSE(has(Kind::kChat, R"({"prompt":[1,2]})"));
    CHECK_FALSE(has(Kind::kChat, "no JSON"));
    CHECK_FALSE(has(Kind::kEmbeddings, R"({"input":"x"})"));
}

TEST_CASE("a line of texts is bounded, and takes first questions alone") {
    Question text = asking(Kind::kChat, R"({"messages":[]})");
    CHECK_FALSE(TokenizeQueue(0).take(text, 1));
    TokenizeQueue texts(2);
    Question again = text, page = text;
    again.attempt = 1;
    page.page = true;
    CHECK_FALSE(texts.take(again, 1));
    CHECK_FALSE(texts.take(page, 1));
    REQUIRE(texts.take(text, 1));  // next() would wait for one that is not there
    REQUIRE(texts.take(text, 2));
    CHECK_FALSE(texts.take(text, 3));
    CHECK_FALSE(texts.overdue(1));
    CHECK(texts.overdue(1.5));
    CHECK_FALSE(texts.overdue(1.5));
    CHECK(texts.next()->request == text.request);
    CHECK_FALSE(texts.poll());
    REQUIRE(texts.take(text, 3));
    CHECK(texts.poll()->request == text.request);
    REQUIRE(texts.take(text, 4));
    texts.close();
    CHECK_FALSE(texts.poll());
    CHECK_FALSE(texts.next());
    CHECK_FALSE(texts.take(text, 3));
}

TEST_CASE("each text goes to one of those who wait, and the end to all of them") {
    constexpr uint64_t kCount = 2000;
    TokenizeQueue texts(kCount);
    std::vector<std::atomic<int>> seen(kCount);
    std::atomic<uint64_t> total{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&] {
            while (auto question = texts.next()) {
                ++seen[question->request->id];
                ++total;
            }
        });
    }
    for (uint64_t id = 0; id < kCount; ++id) {
        Question question = asking(Kind::kChat, "{}");
        question.request->id = id;
        CHECK(texts.take(question, 0));
    }
    while (total < kCount) std::this_thread::yield();
    texts.close();
    for (std::thread& thread : threads) thread.join();
    for (const std::atomic<int>& each : seen) CHECK(each == 1);
}

TEST_CASE("turns: the one whose turn is longest ago is next, whatever others are there") {
    Turns turns;
    auto take = [&](const std::vector<uint16_t>& places) {
        uint16_t place = places[turns.next(places)];
        CHECK(places[turns.next(places)] == place);  // asking changes nothing
        turns.took(place);
        return place;
    };
    const std::vector<uint16_t> all = {0, 2, 65535};
    for (uint16_t expected : {0, 2, 65535, 0}) CHECK(take(all) == expected);
    CHECK(take({0, 65535}) == 65535);  // the turn of 2 is not over by that
    for (uint16_t expected : {2, 0, 65535, 2}) CHECK(take(all) == expected);
    CHECK(take({2, 0, 1}) == 1);  // one without a turn
    CHECK(take({7, 5}) == 7);     // of equals the first
}
