// Tenants' own keys at a listening port: which services they open, for whom, and until when.
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "wire/dial.hpp"
#include "wire/listener.hpp"
#include "wire/tenant_keys.hpp"

using namespace moonpool;

namespace {

constexpr const char* kToken = "the cluster token";
constexpr const char* kWriter = "the key of a's writer";
constexpr const char* kReader = "the key of a's reader";
constexpr const char* kOther = "the key of b's writer";

std::vector<TenantRow> rows() {
    return {{"a", TenantRole::kWriter, {kWriter}},
            {"a", TenantRole::kReader, {kReader}},
            {"b", TenantRole::kWriter, {kOther}}};
}

// A port with a service for clients, and one for nodes.
struct Port {
    std::mutex mutex;
    std::condition_variable arrived;
    std::vector<AuthenticatedConnection> callers;
    std::shared_ptr<TenantKeys> tenants = std::make_shared<TenantKeys>();
    std::shared_ptr<Journal> journal = std::make_shared<Journal>();
    std::unique_ptr<Listener> listener;

    Port() {
        tenants->replace(rows());
        ListenerOptions options;
        options.addresses = {"127.0.0.1:0"};
        options.token = kToken;
        options.incarnation = random_incarnation();
        options.journal = journal;
        options.tenants = tenants;
        Result<std::unique_ptr<Listener>> made = Listener::create(std::move(options));
        REQUIRE(made);
        listener = std::move(*made);
        auto to_cluster = [](std::string_view) -> Result<std::vector<std::byte>> {
            return std::vector<std::byte>{std::byte{1}};
        };
        auto to_tenant = [](std::string_view, const Access& access) -> Result<std::vector<std::byte>> {
            return std::vector<std::byte>{access.may_write() ? std::byte{2} : std::byte{3}};
        };
        auto take = [this](AuthenticatedConnection caller) {
            std::lock_guard lock(mutex);
            callers.push_back(std::move(caller));
            arrived.notify_one();
        };
        listener->offer("clients", Service{to_cluster, take, to_tenant});
        listener->offer("nodes", Service{to_cluster, take});
        REQUIRE(listener->start());
    }

    Result<Dialed> open(Secrets secret, const std::string& tenant, const std::string& service = "clients") {
        DialOptions options;
        options.address = listener->addresses().front();
        options.token = std::move(secret);
        options.tenant = tenant;
        options.service = service;
        options.timeout_ms = 20000;
        return dial(options);
    }
    AuthenticatedConnection next() {
        std::unique_lock lock(mutex);
        REQUIRE(arrived.wait_for(lock, std::chrono::seconds(20), [&] { return !callers.empty(); }));
        AuthenticatedConnection caller = std::move(callers.back());
        callers.pop_back();
        return caller;
    }
};

}  // namespace

TEST_CASE("tenant keys: a key opens its own tenant's service, with its role") {
    Port port;
    Result<Dialed> dialed = port.open(kWriter, "a");
    REQUIRE_MESSAGE(dialed.ok(), (dialed.ok() ? "" : dialed.error().text));
    CHECK(dialed->welcome == std::vector{std::byte{2}});
    AuthenticatedConnection caller = port.next();
    CHECK(caller.tenant == "a");
    CHECK_FALSE(caller.access.is_cluster);
    CHECK(caller.access.role == TenantRole::kWriter);
    CHECK(caller.access.may_write());
    CHECK_FALSE(caller.access.may_list());
    CHECK(port.open(kReader, "a")->welcome == std::vector{std::byte{3}});
    CHECK_FALSE(port.next().access.may_write());
    // The cluster token opens everything, and is told so.
    CHECK(port.open(kToken, "a")->welcome == std::vector{std::byte{1}});
    CHECK(port.next().access.may_list());
    CHECK(port.open(kToken, "of no row").ok());
    CHECK(port.open(kToken, "a", "nodes").ok());
    CHECK(port.listener->counters().auth_failures_total == 0);
}

TEST_CASE("tenant keys: a wrong key, another tenant's, a service of nodes") {
    Port port;
    std::pair<const char*, const char*> wrong[] = {
        {"no key at all", "a"}, {kOther, "a"}, {kWriter, "b"}, {kWriter, "of no row"}};
    for (auto [key, tenant] : wrong) {
        Result<Dialed> dialed = port.open(key, tenant);
        REQUIRE_FALSE(dialed.ok());
        CHECK(dialed.error().code == Code::kAuth);
        CHECK(is_wrong_token(dialed.error()));  // so that a client with two keys shows the other one
        CHECK(dialed.error().text.find("no key of tenant \"" + std::string(tenant) + "\"") !=
              std::string::npos);
        // Whether the tenant has keys is the operator's to know.
        CHECK(dialed.error().text.find('(') == std::string::npos);
    }
    std::vector<Note> notes = port.journal->take();
    REQUIRE(notes.size() == 4);
    CHECK(notes[0].kind == "auth_refused");
    CHECK(notes[0].text.ends_with("(the tenant has other keys)"));
    CHECK(notes[3].text.ends_with("(no row has that tenant)"));
    Result<Dialed> dialed = port.open(kWriter, "a", "nodes");
    REQUIRE_FALSE(dialed.ok());
    CHECK(dialed.error().text.find("a tenant's key does not open the service \"nodes\"") !=
          std::string::npos);
    CHECK(port.listener->counters().auth_failures_total == 5);
}

TEST_CASE("tenant keys: a proof is of one tenant, one service and one connection") {
    TenantKeys keys;
    // Two tenants with one key, which a file may not have.
    keys.replace({{"a", TenantRole::kWriter, {kWriter}}, {"b", TenantRole::kWriter, {kWriter}}});
    Nonce node = random_nonce(), client = random_nonce();
    Incarnation life = random_incarnation();
    Mac mac =
        handshake_mac(Role::kClient, kWriter, node, client, life, mac_tenant("a", "directory"), kVersion);
    std::string_view shown(reinterpret_cast<const char*>(mac.data()), mac.size());
    auto found = [&](const Nonce& nonce, std::string_view tenant, std::string_view service) {
        return keys.find(shown, nonce, client, life, tenant, mac_tenant(tenant, service), kVersion)
            .has_value();
    };
    CHECK(found(node, "a", "directory"));
    CHECK_FALSE(found(node, "b", "directory"));
    CHECK_FALSE(found(node, "a", "store"));
    CHECK_FALSE(found(random_nonce(), "a", "directory"));
    CHECK_FALSE(keys.find({}, node, client, life, "a", mac_tenant("a", "directory"), kVersion).has_value());
}

TEST_CASE("tenant keys: one key replaces another, and is withdrawn") {
    Port port;
    Secrets both = *Secrets::of_text("the new key of a's writer\nthe key of a's writer", "the key file");
    REQUIRE(port.open(kWriter, "a").ok());
    Access by_old = port.next().access;
    REQUIRE(port.open(both, "a").ok());  // the port has the old one alone
    (void)port.next();
    uint64_t version = port.tenants->version();
    port.tenants->replace({{"a", TenantRole::kWriter, {kWriter, "the new key of a's writer"}}});
    CHECK(port.tenants->version() != version);
    CHECK(port.tenants->stands("a", by_old));
    REQUIRE(port.open(both, "a").ok());
    Access by_new = port.next().access;
    CHECK(by_new.key != by_old.key);
    port.tenants->replace({{"a", TenantRole::kWriter, {"the new key of a's writer"}}});
    CHECK_FALSE(port.tenants->stands("a", by_old));
    CHECK(port.tenants->stands("a", by_new));
    CHECK_FALSE(port.tenants->stands("b", by_new));
    CHECK(port.tenants->stands("a", Access{}));  // by the cluster token
    CHECK_FALSE(port.open(kWriter, "a").ok());
    CHECK(port.open(both, "a").ok());
    port.tenants->replace({{"a", TenantRole::kReader, {"the new key of a's writer"}}});
    CHECK_FALSE(port.tenants->stands("a", by_new));  // its role is another one
}
