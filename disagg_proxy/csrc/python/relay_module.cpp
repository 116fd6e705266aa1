// The proxy's data plane as Python sees it: Relay, and the requests that it asks about.
//
// Threads and the GIL. Python calls a PyRelay with the GIL; methods that wait for the relay's thread give
// it up first, as that thread may be waiting for the GIL. The relay's thread has a Python thread state of
// its own, made once (thread_started) and saved between visits: a visit takes the GIL, asks about all
// questions of a turn, and gives it up. Nothing else on that thread touches Python objects.
//
// Who owns what: PyRelay owns the Relay, whose Decider it is. The Python callables hold the proxy, which
// holds this object; close() breaks that cycle, and has to be called.
//
// A policy is the user's code. Whatever it returns is checked here before the relay sees it (decision_of,
// check); whatever it raises is reported, once a second at most, and becomes a failed decision, for which
// the relay chooses an engine itself.

#include <Python.h>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "http/fields.hpp"
#include "http/octets.hpp"
#include "python/proxy_module.hpp"
#include "python/raise.hpp"
#include "python/relay_look.hpp"
#include "python/relay_settings.hpp"
#include "python/view.hpp"
#include "relay/relay.hpp"
#include "relay/tokenize_queue.hpp"
#include "relay/turns.hpp"

namespace moonpool::python {

namespace {

using relay::Decision;
using relay::Question;
using TokenIds = std::optional<std::vector<uint32_t>>;  // of a prompt that is one list of them

PyTypeObject* body_view_type = nullptr;
constexpr size_t kEnginesMax = 65535;  // a place has 16 bits
constexpr std::string_view kSwitchName = "abcdefghijklmnopqrstuvwxyz_";

using Pairs = std::vector<std::pair<std::string, std::string>>;

// One request, for as long as Python keeps it.
class PyRequest {
   public:
    PyRequest(std::shared_ptr<relay::Request> request, py::tuple candidates, uint32_t attempt)
        : request_(std::move(request)), candidates_(std::move(candidates)), attempt_(attempt) {}

    uint64_t id() const { return request_->id; }
    py::bytes path() const { return py::bytes(request_->head.path.data(), request_->head.path.size()); }
    py::bytes method() const { return py::bytes(request_->head.method.data(), request_->head.method.size()); }
    py::object headers(std::string_view name) const {
        const http::Field* field = http::find_field(request_->head.fields, name);
        if (field == nullptr) return py::none();
        return py::bytes(field->value.data(), field->value.size());
    }
    // All in one call, since every decision asks and hardly any request has one: None.
    py::object moonpool_headers() const {
        constexpr std::string_view kPrefix = "x-moonpool-";
        std::optional<py::dict> found;
        for (const http::Field& field : request_->head.fields) {
            if (!http::same_name(field.name.substr(0, kPrefix.size()), kPrefix)) continue;
            if (!found) found.emplace();
            std::string name(field.name.substr(kPrefix.size()));
            std::ranges::transform(name, name.begin(), http::lower);
            py::bytes value(field.value.data(), field.value.size());
            (void)PyDict_SetDefault(found->ptr(), py::str(name).ptr(), value.ptr());  // the first counts
        }
        return found ? py::object(*found) : py::none();
    }
    // A view on the request's memory, not a copy; it holds the request.
    py::object body() const {
        return make_view(body_view_type, request_, reinterpret_cast<const std::byte*>(request_->body.data()),
                         request_->body.size());
    }
    py::str request_id() const { return request_->request_id; }
    double arrived_s() const { return request_->arrived_at; }
    py::object model() const { return text(request_->facts().model); }
    bool stream() const { return request_->facts().stream; }
    std::optional<int64_t> max_tokens() const { return request_->facts().max_tokens; }
    py::object cache_salt() const {
        const std::optional<std::string>& salt = request_->facts().cache_salt;
        return salt ? text(*salt) : py::none();
    }
    // The same objects each time: every decision asks, and looks it up in a set.
    py::str kind() const {
        static PyObject* const names[] = {
            PyUnicode_InternFromString("chat"), PyUnicode_InternFromString("completions"),
            PyUnicode_InternFromString("embeddings"), PyUnicode_InternFromString("generate"),
            PyUnicode_InternFromString("other")};
        return py::reinterpret_borrow<py::str>(names[static_cast<size_t>(request_->kind)]);
    }
    py::object prompt_tokens() const {
        auto ids = request_->prompt_tokens();
        if (!ids) return py::none();
        return to_bytes(*ids);
    }
    py::object prompt_text() const {
        auto prompt = request_->prompt_text();
        return prompt ? text(*prompt) : py::none();
    }
    std::optional<size_t> prompt_count() const { return request_->prompt_count(); }
    bool wants_one() const { return request_->wants_one(); }
    const Pairs& switches() const { return request_->switches; }
    // The relay's thread reads them when it has the decision, which comes after this.
    void set_switches(Pairs switches) {
        for (const auto& [name, value] : switches) {
            if (name.empty() || name.find_first_not_of(kSwitchName) != std::string::npos) {
                throw py::type_error("a switch has a name of lower-case letters and '_'");
            }
        }
        request_->switches = std::move(switches);
    }
    const py::tuple& candidates() const { return candidates_; }
    uint32_t attempt() const { return attempt_; }
    bool gone() const { return request_->gone; }

   private:
    // Text as Python's json would give it: lone surrogates pass, anything else that is no UTF-8 is
    // replaced.
    static py::object text(const std::string& bytes) {
        PyObject* made =
            PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "surrogatepass");
        if (made == nullptr) {  // no UTF-8 at all
            PyErr_Clear();
            made = PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace");
        }
        if (made == nullptr) throw py::error_already_set();
        return py::reinterpret_steal<py::object>(made);
    }

    std::shared_ptr<relay::Request> request_;
    py::tuple candidates_;
    uint32_t attempt_;
};

// TypeError: it is reported as an error of the policy, not of the request.
[[noreturn]] void bad(const char* sentence) { throw py::type_error(sentence); }

relay::Role role_of(const std::string& name) {
    if (name == "prefill") return relay::Role::kPrefill;
    return name == "decode" ? relay::Role::kDecode : relay::Role::kBoth;
}

// Names and values that would break a head (a line break) are refused: they may come from a client's data.
Pairs fields_of(py::handle pairs) {
    Pairs fields;
    for (py::handle pair : pairs) {
        auto [name, value] = pair.cast<std::pair<std::string, std::string>>();
        if (!http::is_field_name(name) || !http::is_field_value(value)) {
            bad("a header has a name or value that cannot stand in a head");
        }
        fields.emplace_back(std::move(name), std::move(value));
    }
    return fields;
}

// disagg_proxy/conductor/plan.py has the two tuples. Raises TypeError.
Decision decision_of(py::handle value, size_t engines) {
    Decision decision;
    auto place = [&](py::handle number) {
        auto at = number.cast<int64_t>();
        if (at < 0 || at >= static_cast<int64_t>(engines)) bad("a plan names an engine that is not there");
        return static_cast<int>(at);
    };
    // The cheapest forms first: most decisions are a place, or later.
    if (value.is_none()) {
        decision.kind = Decision::Kind::kLater;
    } else if (PyLong_Check(value.ptr())) {
        decision.kind = Decision::Kind::kPlan;
        decision.plan.engine = place(value);
    } else if (PyTuple_Check(value.ptr()) && PyTuple_GET_SIZE(value.ptr()) == 8) {
        auto plan = py::reinterpret_borrow<py::tuple>(value);
        decision.kind = Decision::Kind::kPlan;
        decision.plan.engine = place(plan[0]);
        if (!plan[1].is_none()) decision.plan.prefill = place(plan[1]);
        if (!plan[2].is_none()) {
            // What is given tells the form: see the table in relay/handover_forms.hpp. Without parameters and
            // members it is two-step.
            decision.plan.form = plan[3].is_none() ? relay::Form::kContextFirst : relay::Form::kConcurrent;
            decision.plan.prefill_params = plan[2].cast<std::string>();
            if (!plan[3].is_none()) decision.plan.engine_params = plan[3].cast<std::string>();
        }
        decision.plan.headers = fields_of(plan[4]);
        decision.plan.note = plan[5].cast<int64_t>();
        decision.plan.prefill_headers = fields_of(plan[6]);
        decision.plan.members = plan[7].cast<Pairs>();
        if (!decision.plan.members.empty()) {
            bool same = plan[2].is_none();
            decision.plan.form = same ? relay::Form::kOneShot : relay::Form::kGenerationFirst;
        }
        if (decision.plan.prefill == decision.plan.engine) bad("a plan prefills where it decodes");
    } else if (PyTuple_Check(value.ptr()) && PyTuple_GET_SIZE(value.ptr()) == 5) {
        auto answer = py::reinterpret_borrow<py::tuple>(value);
        decision.kind = Decision::Kind::kPage;
        decision.page.status = answer[0].cast<int>();
        decision.page.body = answer[1].cast<std::string>();
        decision.page.content_type = answer[2].cast<std::string>();
        decision.page.headers = fields_of(answer[3]);
        decision.page.reason = answer[4].cast<std::string>();
        if (decision.page.status < 200 || decision.page.status > 599) bad("an answer's status is 200 to 599");
    } else {
        bad("a decision is an engine's place, a Plan, an Answer or None");
    }
    return decision;
}

// Of TLS: certificate, key, authorities.
using PyTlsFiles = std::optional<std::tuple<std::string, std::string, std::string>>;

TlsFiles files_of(const std::tuple<std::string, std::string, std::string>& given, const TlsUse& use) {
    const auto& [cert, key, ca] = given;
    return {cert, key, ca, &use};
}

constexpr TlsUse kClientTls{
    "proxy.tls_cert", "proxy.tls_key", "proxy.tls_client_ca", "its owner needs a new one", "", "", true};

constexpr TlsUse kEngineTls{"proxy.engine_tls_cert",
                            "proxy.engine_tls_key",
                            "proxy.engine_tls_ca",
                            "the engine needs a new one",
                            ", and name the engine by that, or set proxy.engine_tls_name",
                            "set proxy.engine_tls_cert and engine_tls_key to one that the engine trusts",
                            true};

// SHA-256 of each key, and its salt.
using PyApiKeys = std::vector<std::pair<py::bytes, std::string>>;

std::vector<relay::ApiKey> api_keys_of(const PyApiKeys& given) {
    std::vector<relay::ApiKey> keys;
    for (const auto& [digest, salt] : given) {
        std::string_view bytes = digest;
        relay::ApiKey& key = keys.emplace_back();
        if (bytes.size() != key.digest.size()) bad("the digest of an API key has 32 bytes");
        if (salt.find_first_not_of("0123456789abcdef") != std::string::npos) bad("a salt is hexadecimal");
        std::copy(bytes.begin(), bytes.end(), key.digest.begin());
        key.salt = salt;
    }
    return keys;
}

class PyRelay final : public relay::Decider {
   public:
    PyRelay(const std::vector<std::tuple<std::string, std::string, std::string>>& engines,
            const py::dict& values, const PyApiKeys& api_keys, std::string access_log, std::string instance,
            double retry_after_s, bool spans, py::function decide, py::function page, py::function refused,
            size_t texts_max, size_t engines_max, py::object gone, bool registry,
            std::vector<std::string> relay_paths, bool uses_tokens,
            std::optional<std::shared_ptr<relay::Turns>> turns, const PyTlsFiles& tls, PyTlsFiles engine_tls,
            std::string engine_tls_name)
        : turns_(turns.value_or(nullptr)),
          decide_(std::move(decide)),
          page_(std::move(page)),
          refused_(std::move(refused)),
          gone_(std::move(gone)),
          uses_tokens_(uses_tokens),
          engine_files_(std::move(engine_tls)),
          engine_name_(std::move(engine_tls_name)),
          tokenize_queue_(texts_max) {
        relay::Settings settings;
        for (const auto& [name, host, role] : engines) {
            settings.engines.push_back({name, host, role_of(role), ""});
        }
        fill(values, settings);
        settings.api_keys = api_keys_of(api_keys);
        if (tls) settings.tls = unwrap(TlsServer::create(files_of(*tls, kClientTls)), "tls");
        tls_ = settings.tls;
        settings.access_log = std::move(access_log);
        settings.instance = std::move(instance);
        settings.spans = spans;
        settings.registry = registry;
        settings.relay_paths = std::move(relay_paths);
        settings.retry_after_s = retry_after_s;
        // Places are numbers below engines_; tables in the relay have this size from the start.
        settings.engines_max = engines_ = std::max(settings.engines.size(), engines_max);
        if (engines_ > kEnginesMax) bad("a relay has 65535 engines at most");
        // Without the GIL: the thread that it starts takes it at once.
        auto started = [&] {
            py::gil_scoped_release nogil;
            return relay::Relay::start(std::move(settings), *this);
        }();
        relay_ = unwrap(std::move(started), "proxy");
    }
    ~PyRelay() override { close(); }

    void listen(int fd) {
        py::gil_scoped_release nogil;
        // The caller's socket object closes its own descriptor.
        relay_->listen(::dup(fd));
    }
    void add_engine(size_t place, std::string name, std::string host, const std::string& role,
                    const std::string& key, bool tls) {
        // The first one reads the files: without such an engine OpenSSL need not be there.
        if (tls && engine_tls_ == nullptr) {
            TlsFiles files = files_of(
                engine_files_.value_or(std::tuple<std::string, std::string, std::string>()), kEngineTls);
            engine_tls_ = unwrap(TlsClient::create(files, engine_name_), "tls");
        }
        std::string authorization = key.empty() ? "" : "Bearer " + key;
        if (!http::is_field_value(authorization)) bad("an engine's key cannot stand in a head");
        relay_->add_engine(checked(place), {std::move(name), std::move(host), role_of(role),
                                            std::move(authorization), tls ? engine_tls_ : nullptr});
    }
    void remove_engine(size_t place, double drain_s) { relay_->remove_engine(checked(place), drain_s); }
    void engine_state(size_t place, bool healthy, const std::string&) {
        relay_->engine_state(checked(place), healthy);
    }
    // Numbers only: names are resolved in Python, because the relay's thread, for which all sockets wait,
    // must not wait for DNS.
    void engine_address(size_t place, const std::string& address, uint16_t port) {
        sockaddr_storage storage{};
        auto& four = reinterpret_cast<sockaddr_in&>(storage);
        auto& six = reinterpret_cast<sockaddr_in6&>(storage);
        if (::inet_pton(AF_INET, address.c_str(), &four.sin_addr) == 1) {
            four.sin_family = AF_INET;
            four.sin_port = htons(port);
            relay_->engine_address(checked(place), storage, sizeof(four));
        } else if (::inet_pton(AF_INET6, address.c_str(), &six.sin6_addr) == 1) {
            six.sin6_family = AF_INET6;
            six.sin6_port = htons(port);
            relay_->engine_address(checked(place), storage, sizeof(six));
        } else {
            raise(Error{Code::kInvalidArgument, address + " is no IP address"}, "proxy");
        }
    }
    void engine_models(size_t place, std::optional<std::vector<std::string>> models) {
        relay_->engine_models(checked(place), std::move(models));
    }
    void engine_role(size_t place, const std::string& role, double patience_s) {
        relay_->engine_role(checked(place), role_of(role), patience_s);
    }
    void engine_late(size_t place) { relay_->engine_late(checked(place)); }
    void set_api_keys(const PyApiKeys& keys) {
        std::vector<relay::ApiKey> made = api_keys_of(keys);
        py::gil_scoped_release nogil;
        relay_->set_api_keys(std::move(made));
    }
    void reopen_access_log() {
        Status opened = success();
        {
            py::gil_scoped_release nogil;
            opened = relay_->reopen_access_log();
        }
        if (!opened) raise(opened.error(), "access_log");
    }
    void resume(const PyRequest& request, const py::object& decision) {
        // Checked on the caller's thread, so that a bad decision is an exception there.
        Decision checked = decision_of(decision, engines_);
        // Wakes the relay's thread, which may run in this one's place: others that tokenise go on meanwhile.
        py::gil_scoped_release nogil;
        relay_->resume(request.id(), std::move(checked));
    }
    std::vector<std::string> take_tls_trouble() {
        std::vector<std::string> found;
        if (tls_ != nullptr) found.push_back(tls_->take_trouble());
        if (engine_tls_ != nullptr) found.push_back(engine_tls_->take_trouble());
        std::erase(found, "");
        return found;
    }
    bool drain(double timeout_s) {
        py::gil_scoped_release nogil;
        return relay_->drain(timeout_s);
    }
    void close() {
        {
            py::gil_scoped_release nogil;
            tokenize_queue_.close();
            if (relay_) relay_->close();
        }
        // The thread that called them has ended. They hold the proxy, which holds this: a cycle that Python's
        // collector cannot see.
        decide_ = page_ = refused_ = py::function();
        gone_ = py::none();
    }
    std::optional<PyRequest> next_text() {
        // The GIL is kept where one is in line: to get it back from another thread that tokenises costs a
        // sleep and a wake-up.
        std::optional<Question> question = tokenize_queue_.poll();
        if (!question) {
            py::gil_scoped_release nogil;
            // Waits without the GIL until there is one, or the proxy closes.
            question = tokenize_queue_.next();
        }
        return request_of(question);
    }
    // Asked from time to time, so that a text that waited too long for a tokenizer thread is decided
    // without tokens.
    std::optional<PyRequest> overdue_text(double since_s) {
        return request_of(tokenize_queue_.overdue(since_s));
    }
    void advance_clock_for_test(double seconds) {
        py::gil_scoped_release nogil;
        relay_->advance_clock_for_test(seconds);
    }
    double now() const { return relay_->clock(); }
    uint32_t in_flight(size_t place) const { return relay_->in_flight(checked(place)); }
    double rests_until(size_t place) const { return relay_->rests_until(checked(place)); }

    py::bytes take_observations() { return py::bytes(relay_->take_observations()); }

    py::dict counters() { return relay_counters(*relay_, policy_errors_); }
    py::list clients() { return relay_clients(*relay_); }

    // Decider, on the relay's thread.

    void thread_started() override {
        // The thread state stays for the thread's life; without it each visit would make one.
        gil_ = PyGILState_Ensure();
        thread_ = PyEval_SaveThread();
    }
    void thread_ending() override {
        PyEval_RestoreThread(thread_);
        PyGILState_Release(gil_);
    }
    void decide(std::vector<Question>& questions) override {
        // Without the GIL: which of them Python has to answer, and the ids of their prompts. Where all went
        // by turns, or to the tokenizer threads, the GIL is not taken at all.
        std::vector<std::pair<Question*, TokenIds>> asked;
        for (Question& question : questions) {
            if (goes_by_turns(question)) {
                uint16_t place = question.candidates[turns_->next(question.candidates)];
                turns_->took(place);
                question.decision.kind = Decision::Kind::kPlan;
                question.decision.plan.engine = place;
                continue;
            }
            if (tokenize_queue_.take(question, relay_->context().now)) {
                question.decision.kind = Decision::Kind::kLater;
            } else {
                bool wanted = uses_tokens_ && !question.page;
                asked.emplace_back(&question, wanted ? question.request->prompt_tokens() : std::nullopt);
            }
        }
        if (asked.empty()) return;
        PyEval_RestoreThread(thread_);
        for (auto& [question, ids] : asked) question->decision = ask(*question, ids);
        thread_ = PyEval_SaveThread();
    }
    // A refused connection is a sure sign that the engine does not serve. The callable only posts this to the
    // proxy's own loop.
    void engine_refused(size_t place, const std::string& why) override {
        PyEval_RestoreThread(thread_);
        try {
            refused_(place, why);
        } catch (py::error_already_set& error) {
            // There is no Python caller to raise to.
            error.discard_as_unraisable("moonpool proxy: refused");
        }
        thread_ = PyEval_SaveThread();
    }
    // The place may be given to another engine from now on.
    void engine_gone(size_t place) override {
        PyEval_RestoreThread(thread_);
        try {
            if (!gone_.is_none()) gone_(place);
        } catch (py::error_already_set& error) {
            error.discard_as_unraisable("moonpool proxy: gone");
        }
        thread_ = PyEval_SaveThread();
    }

   private:
    size_t checked(size_t place) const {
        if (place >= engines_) throw py::index_error("there is no engine at this place");
        return place;
    }

    // The usual case of no failures makes the same tuple again and again.
    // Under the GIL, on whichever thread asks.
    const py::tuple& tuple_of(const std::vector<uint16_t>& places) {
        if (!last_tuple_ || places != last_places_) {
            py::tuple made(places.size());
            for (size_t i = 0; i < places.size(); ++i) made[i] = py::int_(places[i]);
            last_places_ = places;
            last_tuple_ = std::move(made);
        }
        return last_tuple_;
    }

    std::optional<PyRequest> request_of(const std::optional<Question>& question) {
        if (!question) return std::nullopt;
        return PyRequest(question->request, tuple_of(question->candidates), question->attempt);
    }

    // Whether the policy would answer with the next in turn and nothing else: each candidate serves requests
    // whole, and the client asks neither for the reasons nor for switches.
    bool goes_by_turns(const Question& question) const {
        if (turns_ == nullptr || question.page) return false;
        auto whole = [&](int place) { return relay_->engines().at(place).role == relay::Role::kBoth; };
        auto says = [&](const char* name) {
            return http::find_field(question.request->head.fields, name) != nullptr;
        };
        return std::ranges::all_of(question.candidates, whole) && !says("x-moonpool-decision") &&
               !says("x-moonpool-store") && !says("x-moonpool-load");
    }

    // What decide is told besides the request costs it no call: the time, what was recorded since it was last
    // told, the prompt's ids.
    py::object ask_policy(PyRequest request, const TokenIds& ids) {
        py::bytes records = uses_tokens_ ? take_observations() : py::bytes();
        double now_s = relay_->clock();  // no record is of a later time
        return decide_(std::move(request), now_s, records, ids ? py::object(to_bytes(*ids)) : py::none());
    }

    // Whatever goes wrong here is the policy's failure: kFailed, and the relay chooses an engine itself.
    Decision ask(const Question& question, const TokenIds& ids) {
        try {
            PyRequest request(question.request, tuple_of(question.candidates), question.attempt);
            py::object answer =
                question.page ? page_(std::move(request)) : ask_policy(std::move(request), ids);
            Decision decision = decision_of(answer, engines_);
            if (decision.kind == Decision::Kind::kPlan) check(decision.plan, question);
            return decision;
        } catch (py::error_already_set& error) {
            report(error);
        } catch (const py::builtin_exception& error) {
            error.set_error();
            py::error_already_set raised;
            report(raised);
        }
        return Decision{};  // kFailed
    }

    // Candidates only: another engine may lack the model, rest, or have been tried by this request.
    static void check(const relay::Plan& plan, const Question& question) {
        for (int place : {plan.engine, plan.prefill}) {
            if (place < 0) continue;
            const auto& all = question.candidates;
            if (std::find(all.begin(), all.end(), place) == all.end()) {
                bad("a plan names an engine that is no candidate");
            }
        }
    }

    // A policy that breaks at each request must not fill the disk with tracebacks.
    void report(py::error_already_set& error) {
        ++policy_errors_;
        double now = relay_->context().now;
        if (now - reported_at_ < 1 && reported_at_ > 0) return;
        reported_at_ = now;
        error.discard_as_unraisable("moonpool proxy: policy");
    }

    std::shared_ptr<const TlsServer> tls_;         // nullptr: clients come in plain
    std::shared_ptr<const TlsClient> engine_tls_;  // nullptr: no engine has it so far
    const std::shared_ptr<relay::Turns> turns_;    // nullptr: the policy is asked about each request
    py::function decide_, page_, refused_;
    py::object gone_;
    size_t engines_ = 0;
    const bool uses_tokens_;
    const PyTlsFiles engine_files_;
    std::string engine_name_;
    relay::TokenizeQueue tokenize_queue_;
    std::unique_ptr<relay::Relay> relay_;
    PyGILState_STATE gil_{};
    PyThreadState* thread_ = nullptr;
    std::vector<uint16_t> last_places_;
    py::tuple last_tuple_;
    std::atomic<uint64_t> policy_errors_{0};
    double reported_at_ = 0;
};

}  // namespace

void bind_relay(py::module_& m) {
    body_view_type = make_view_type();
    py::class_<PyRequest>(m, "ProxyRequest", "A client's request, whole, as a policy sees it.")
        .def_property_readonly("id", &PyRequest::id)
        .def_property_readonly("path", &PyRequest::path)
        .def_property_readonly("method", &PyRequest::method)
        .def("headers", &PyRequest::headers, py::arg("name"), "The first field of this name, or None.")
        .def_property_readonly(
            "moonpool_headers", &PyRequest::moonpool_headers,
            "Its fields X-Moonpool-*: dict of the rest of the name in lower case to the first "
            "value, bytes; None when it has none.")
        .def_property_readonly("body", &PyRequest::body, "Read-only memoryview.")
        .def_property_readonly("request_id", &PyRequest::request_id)
        .def_property_readonly("arrived_s", &PyRequest::arrived_s)
        .def_property_readonly("model", &PyRequest::model, "\"\" when the body names none.")
        .def_property_readonly("stream", &PyRequest::stream)
        .def_property_readonly("max_tokens", &PyRequest::max_tokens)
        .def_property_readonly("cache_salt", &PyRequest::cache_salt)
        .def_property("switches", &PyRequest::switches, &PyRequest::set_switches)
        .def_property_readonly("kind", &PyRequest::kind, "chat, completions, embeddings, generate or other.")
        .def("prompt_tokens", &PyRequest::prompt_tokens,
             "Little-endian u32 ids when the prompt is one list of ids, else None.")
        .def("prompt_text", &PyRequest::prompt_text, "The prompt when it is one string, else None.")
        .def("prompt_count", &PyRequest::prompt_count,
             "How many prompts there are when it is a list of them, else None.")
        .def_property_readonly("wants_one", &PyRequest::wants_one,
                               "Whether it is for one answer to one prompt.")
        .def_property_readonly("candidates", &PyRequest::candidates, "Places of the engines to choose from.")
        .def_property_readonly("attempt", &PyRequest::attempt, "How many plans have failed.")
        .def_property_readonly("gone", &PyRequest::gone, "Whether the client has left.");
    py::class_<relay::Turns, std::shared_ptr<relay::Turns>>(
        m, "Turns", "Of some engines, the one that was chosen longest ago is next. For one thread.")
        .def(py::init<>())
        .def(
            "next",
            [](const relay::Turns& turns, const std::vector<uint16_t>& places) {
                if (places.empty()) throw py::value_error("there is no place to choose from");
                return turns.next(places);
            },
            py::arg("places"),
            "Which of these places is next: its index. One without a turn comes first; of equals the first. "
            "Changes no turn. Raises ValueError when there are none.")
        .def("took", &relay::Turns::took, py::arg("place"), "It had its turn.");
    py::class_<PyRelay>(m, "Relay", "The proxy's data plane: one thread that serves all sockets.")
        .def(py::init<const std::vector<std::tuple<std::string, std::string, std::string>>&, const py::dict&,
                      const PyApiKeys&, std::string, std::string, double, bool, py::function, py::function,
                      py::function, size_t, size_t, py::object, bool, std::vector<std::string>, bool,
                      std::optional<std::shared_ptr<relay::Turns>>, const PyTlsFiles&, PyTlsFiles,
                      std::string>(),
             py::kw_only(), py::arg("engines"), py::arg("settings"), py::arg("api_keys"),
             py::arg("access_log"), py::arg("instance"), py::arg("retry_after_s"), py::arg("spans"),
             py::arg("decide"), py::arg("page"), py::arg("refused"), py::arg("texts_max") = 0,
             py::arg("engines_max") = 0, py::arg("gone") = py::none(), py::arg("registry") = false,
             py::arg("relay_paths") = std::vector<std::string>(), py::arg("uses_tokens") = false,
             py::arg("turns") = py::none(), py::arg("tls") = py::none(), py::arg("engine_tls") = py::none(),
             py::arg("engine_tls_name") = "",
             "decide(request, now_s, records, ids) is asked once for each request and attempt. uses_tokens: "
             "it looks at prompts and learns from what was recorded: records is what take_observations would "
             "return, ids the prompt's when it is one list of them, else None. Otherwise b\"\" and None. "
             "turns: of a policy that goes by them alone (policy.turns_of): where all candidates serve "
             "requests whole, the relay chooses by them, and decide is not called. api_keys: as in "
             "set_api_keys. tls: clients come inside it: paths of a certificate, of its key, and of the "
             "authorities that vouch for clients, or \"\". engine_tls: the same for engines, which are shown "
             "the "
             "certificate, or none, and trusted by the authorities, or the system's.")
        .def_static("setting_names", &relay_setting_names, "Of all in ``settings``.")
        .def("listen", &PyRelay::listen, py::arg("fd"), "Accept on a listening socket (a copy is kept).")
        .def(
            "add_engine", &PyRelay::add_engine, py::arg("place"), py::arg("name"), py::arg("host"),
            py::arg("role") = "both", py::arg("key") = "", py::arg("tls") = false,
            "At a free place, below engines_max. key: what the engine is shown as Authorization: Bearer KEY, "
            "in place of the client's. tls: it is spoken to inside TLS, and host is the name that its "
            "certificate "
            "must have. Raises an error for files that cannot be used.")
        .def("remove_engine", &PyRelay::remove_engine, py::arg("place"), py::arg("drain_s"),
             "No request goes there any more; those that are there have so long to end. Then gone(place) is "
             "called, on the relay's thread: the place is free.")
        .def("engine_state", &PyRelay::engine_state, py::arg("place"), py::arg("healthy"), py::arg("why"))
        .def("engine_address", &PyRelay::engine_address, py::arg("place"), py::arg("address"),
             py::arg("port"))
        .def("engine_models", &PyRelay::engine_models, py::arg("place"), py::arg("models"),
             "None: it did not say; it may get any request.")
        .def(
            "engine_role", &PyRelay::engine_role, py::arg("place"), py::arg("role"),
            py::arg("patience_s") = 0.0,
            "both, prefill or decode: what it turned out to be. patience_s: how long it may answer no health "
            "check before its requests are moved or given up, if suspect_engine_s, silent_engine_s are less.")
        .def("engine_late", &PyRelay::engine_late, py::arg("place"),
             "It has not answered a health check in time. Two in a row make it suspect, until engine_state.")
        .def("set_api_keys", &PyRelay::set_api_keys, py::arg("keys"),
             "The keys of which a client has to show one, for all requests that begin from now on: SHA-256 "
             "digest, and a salt in hexadecimal that engines are told with its requests, or \"\". None: no "
             "key is wanted. Raises ValueError for a digest that is not 32 bytes long, or another salt.")
        .def("reopen_access_log", &PyRelay::reopen_access_log,
             "Opens it by its name again, for a rotation. Raises an error of the system, and then goes on "
             "with the file that it had.")
        .def("take_tls_trouble", &PyRelay::take_tls_trouble,
             "Why files of TLS that were replaced are not in use; each is told once.")
        .def("resume", &PyRelay::resume, py::arg("request"), py::arg("decision"),
             "The decision about a request for which decide returned None. From any thread.")
        .def("next_text", &PyRelay::next_text,
             "Waits for a request whose prompt is text; decide is not asked about it, and its decision goes "
             "to "
             "resume. None: closed. With texts_max, which is how many may be in line.")
        .def("overdue_text", &PyRelay::overdue_text, py::arg("since_s"),
             "The first in line, if it came before this time; else None.")
        .def("drain", &PyRelay::drain, py::arg("timeout_s"), "Whether all requests finished in time.")
        .def("close", &PyRelay::close)
        .def("advance_clock_for_test", &PyRelay::advance_clock_for_test, py::arg("seconds"),
             "For tests: let so much time pass.")
        .def("now", &PyRelay::now, "Seconds of the relay's monotonic clock.")
        .def("in_flight", &PyRelay::in_flight, py::arg("place"))
        .def(
            "rests_until", &PyRelay::rests_until, py::arg("place"),
            "Until when the engine gets no request, because it failed some: seconds of now(). 0: it does not "
            "rest.")
        .def("take_observations", &PyRelay::take_observations,
             "Records of what was answered since the last call: relay/observations.hpp has their form.")
        .def("counters", &PyRelay::counters)
        .def("clients", &PyRelay::clients, "What each client's connection is doing.");
}

}  // namespace moonpool::python
