#include "relay/client_table.hpp"

#include <algorithm>
#include <string>

namespace moonpool::relay {

namespace {

// Of the idle connections so many are looked at for one that is to be closed.
constexpr size_t kLookedAtMax = 256;
// So many connections above the limit get the time to read why they are refused; further ones are closed at
// once, so that a crowd cannot take the descriptors that the others need.
constexpr size_t kRefusedMax = 32;

}  // namespace

ClientTable::ClientTable(RelayContext& context, const EngineTable& engine_table, RequestPool& request_pool,
                         ExchangePool& exchange_pool)
    : routes(context.settings.registry, context.settings.relay_paths),
      engines(engine_table),
      requests(request_pool),
      exchanges(exchange_pool),
      budget(context.settings.limits),
      context_(context),
      keys_(context.settings.api_keys) {}

bool ClientTable::admit(Request& request) const {
    if (!keys_.any()) return true;
    const http::Field* field = http::find_field(request.head.fields, "authorization");
    const ApiKey* key = field == nullptr ? nullptr : keys_.find(field->value);
    if (key == nullptr) return false;
    request.salt = key->salt;
    return true;
}

void ClientTable::accept(int fd, const sockaddr_storage& peer) {
    ++accepted_;
    const Limits& limits = context_.settings.limits;
    clients_.push_back(
        std::make_unique<Client>(context_, *this, fd, clients_.size(), Addresses::key_of(peer)));
    Client& client = *clients_.back();
    client.begin();
    if (!client.open()) return;
    // Where places are short, the oldest idle connection is closed for a new one.
    size_t most = limits.client_connections_max;
    if (clients_.size() > most && !close_idle(client, nullptr)) {
        client.refuse({503, "connections",
                       "the proxy has its limit of " + std::to_string(most) + " connections; try again"});
        if (clients_.size() > most + kRefusedMax) client.abort();
        return;
    }
    most = std::max<size_t>(1, static_cast<size_t>(static_cast<double>(most) * limits.address_share));
    if (client.of_address().connections > most && !close_idle(client, &client.address)) {
        client.refuse({429, "address_connections",
                       "your address has its share of " + std::to_string(most) +
                           " connections; close some, or have the operator raise proxy.address_share"});
        if (client.open() && client.of_address().connections > most + kRefusedMax) client.abort();
    }
}

void ClientTable::shed() {
    std::vector<Client*> slowest;
    for (auto& client : clients_) {
        if (client->unread() > 0) slowest.push_back(client.get());
    }
    std::sort(slowest.begin(), slowest.end(),
              [](const Client* a, const Client* b) { return a->took_at() < b->took_at(); });
    for (Client* client : slowest) {
        if (budget.unread_bytes() <= context_.settings.limits.unread_bytes_max / 8 * 7) return;
        if (!client->open()) continue;
        context_.count_rejected("unread");
        client->abort();
    }
}

// Closes the connection that has been idle for longest, strangers' first. False: there is none.
bool ClientTable::close_idle(const Client& newcomer, const uint64_t* of_address) {
    size_t looked_at = 0;
    for (IdleList* list : {&strangers, &idle}) {
        for (IdleList::Hook* hook = list->first(); hook != nullptr; hook = hook->next()) {
            if (++looked_at > kLookedAtMax) return false;
            Client& client = *static_cast<Client::Idle*>(hook)->client;
            if (&client == &newcomer || (of_address != nullptr && client.address != *of_address)) continue;
            if (list == &idle && (client.look().busy || client.unread() > 0)) continue;
            context_.count_rejected("idle_closed");
            client.abort();
            return true;
        }
    }
    return false;
}

void ClientTable::defer_delete(Client& client) {
    size_t index = client.index;
    context_.defer_delete(std::move(clients_[index]));
    if (index + 1 < clients_.size()) {
        clients_[index] = std::move(clients_.back());
        clients_[index]->index = index;
    }
    clients_.pop_back();
}

bool ClientTable::go_on() {
    if (ready_.empty()) return false;
    std::vector<Client*> going;
    going.swap(ready_);
    for (Client* client : going) client->go_on();
    return true;
}

void ClientTable::sweep() {
    std::vector<Client*> all;
    all.reserve(clients_.size());
    for (auto& client : clients_) all.push_back(client.get());
    for (Client* client : all) {
        if (client->open()) client->sweep(context_.now);
    }
}

void ClientTable::drain() {
    for (size_t i = clients_.size(); i-- > 0;) {
        if (i < clients_.size()) clients_[i]->drain();
    }
}

void ClientTable::abort_all() {
    while (!clients_.empty()) clients_.back()->abort();
}

bool ClientTable::check_integrity() const {
    size_t body_bytes = 0, unread_bytes = 0;
    for (const auto& client : clients_) {
        body_bytes += client->budgeted();
        unread_bytes += client->unread();
    }
    return budget.check_integrity(body_bytes, unread_bytes);
}

}  // namespace moonpool::relay
