// Client: one client's connection: reads requests one after the other, answers them or has them relayed.
//
//     idle -> head -> body -> answering -> idle ...     kClientStates has all transitions
//
// A request's path, method and key are judged when its head is there: no body is read that will be refused,
// but for a small one, which is dropped, so that the connection stays usable.
//
// At most one request is under way; what the client sends meanwhile is held up to a bound, then not read any
// more; nothing is read or started while the client does not take what was written to it; every state has a
// deadline (sweep), but for answering, where the exchange brings its own.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/state.hpp"
#include "http/body_reader.hpp"
#include "http/refusal.hpp"
#include "http/request_parser.hpp"
#include "relay/addresses.hpp"
#include "relay/client_budget.hpp"
#include "relay/idle_list.hpp"
#include "relay/out_buffer.hpp"
#include "relay/poller.hpp"
#include "relay/request.hpp"
#include "relay/routes.hpp"
#include "relay/transport.hpp"

namespace moonpool::relay {

class Exchange;
class ClientTable;
struct RelayContext;

enum class ClientState : uint8_t {
    kIdle,       // no request is under way; first of all, where the port has TLS, its handshake
    kHead,       // part of a head has come
    kBody,       // the head is accepted, its body is read
    kDropping,   // the head is refused, its body, a small one, is read and dropped so that the connection
                 // stays
    kAnswering,  // the request is there whole
    // From here on no request is read any more.
    kLingering,  // refused: the client gets time to read why
    kClosing,    // what is to be written is its last
    kClosed,
};

inline constexpr Transitions<ClientState, 8> kClientStates{
    "relay::Client",
    {
        {ClientState::kIdle,
         "idle",
         {ClientState::kHead, ClientState::kBody, ClientState::kDropping, ClientState::kLingering,
          ClientState::kClosing, ClientState::kClosed}},
        {ClientState::kHead,
         "head",
         {ClientState::kBody, ClientState::kDropping, ClientState::kLingering, ClientState::kClosing,
          ClientState::kClosed}},
        {ClientState::kBody,
         "body",
         {ClientState::kAnswering, ClientState::kLingering, ClientState::kClosing, ClientState::kClosed}},
        {ClientState::kDropping,
         "dropping",
         {ClientState::kAnswering, ClientState::kLingering, ClientState::kClosing, ClientState::kClosed}},
        {ClientState::kAnswering, "answering", {ClientState::kIdle, ClientState::kClosed}},
        {ClientState::kLingering, "lingering", {ClientState::kClosing, ClientState::kClosed}},
        {ClientState::kClosing, "closing", {ClientState::kClosed}},
        {ClientState::kClosed, "closed", {}},
    }};
static_assert(kClientStates.is_complete());

class Client final : public Socket {
   public:
    // address: as Addresses has it.
    Client(RelayContext& context, ClientTable& table, int fd, size_t index, uint64_t address);
    ~Client() override;

    void on_events(uint32_t events) override;
    // In the table of clients, which sets it.
    size_t index;

    // What the relay calls.
    void begin();  // right after it was accepted
    void go_on();  // the request under way is over: take up what was held
    void sweep(double now);
    void drain();  // finish what is under way or was sent already, then close
    void abort();  // close at once; what was not written yet is lost
    // Answer, and read no more of it: of this request, or because there are too many connections.
    void refuse(const http::Refusal& refusal);

    const uint64_t address;
    Held& of_address() { return of_address_; }

    // In one of the table's lists while the connection can be closed for another one's sake.
    struct Idle : IdleList::Hook {
        explicit Idle(Client* client) : client(client) {}
        Client* const client;
    };

    // What the exchange calls. One of the last four once, unless it is cancelled.
    void write(std::string_view head, std::string_view body);
    void exchange_finished(bool close);                   // the answer is whole
    void exchange_refused(const http::Refusal& refusal);  // nothing was written: answer this
    void answer_page(const Page& page);                   // nothing was written: answer this
    void exchange_broken();  // something was written and the rest will not come: the client must see a cut

    // For tests and the operator.
    struct Look {
        bool busy, lingering, held_back, write_paused, reading_body;
        size_t held, body, unwritten;
    };
    Look look() const;
    size_t budgeted() const { return budgeted_; }
    size_t unread() const { return unread_; }
    double took_at() const { return took_at_; }  // when it last took something of what waits for it

   private:
    void shake_hands();
    void handshake_failed();
    void read_some(uint32_t events);
    void take(std::string_view data);
    size_t read(std::string_view data);
    bool read_head(std::string_view data, size_t& at);
    bool judge();
    void hold(std::string_view data);
    void await_more();
    bool count_body();
    ClientBudget::For body_for() const {
        return route_ == Route::kPage ? ClientBudget::For::kPages : ClientBudget::For::kEngines;
    }
    void wait_idle();
    void give_budget();
    void count_unread();
    void serve();
    bool last() const;
    void answer(int status, std::string_view reason, std::string_view body, std::string_view type,
                const std::vector<std::pair<std::string, std::string>>& headers, bool close);
    void refuse_request(const http::Refusal& refusal, bool close);
    void end_request(bool close);
    void end_output();
    void log(int status, uint64_t bytes);
    void end_of_input();
    void expire();
    void close_soon();
    void flush();
    void watch();
    bool busy() const;
    void enter(ClientState state, double deadline_s);
    bool reading_body() const { return state_ == ClientState::kBody || state_ == ClientState::kDropping; }
    bool in_head() const { return state_ == ClientState::kHead && parser_.begun(); }  // not only blank lines
    bool ending() const { return state_ >= ClientState::kLingering; }
    size_t unwritten() const { return out_.size() + transport_.unsent(); }
    Exchange* let_exchange_go();

    RelayContext& context_;
    ClientTable& table_;
    http::RequestParser parser_;
    http::BodyReader body_;
    std::shared_ptr<Request> request_;  // being read, or being answered
    Exchange* exchange_ = nullptr;
    std::string partial_;  // a head that is not whole
    std::string held_;     // read ahead while a request is under way, from held_at_ on
    size_t held_at_ = 0;
    Transport transport_;
    OutBuffer out_;  // behind what waits in transport_
    State<kClientStates> state_;
    bool held_back_ = false;     // too much was read ahead: reads no more for now
    bool write_paused_ = false;  // the client takes too little: starts nothing for now
    bool ready_ = false;         // the table calls go_on() in this turn
    // The most that it has been so far: of a whole request, and of one that was for an engine.
    enum class Past : uint8_t { kNone, kAsked, kServed } past_ = Past::kNone;
    // Of the request that is being read.
    Route route_ = Route::kRefused;
    http::Refusal refusal_;   // while dropping
    bool continued_ = false;  // the client was told to send the body
    size_t budgeted_ = 0, read_bytes_ = 0;
    size_t unread_ = 0;
    double deadline_ = 0, took_at_ = 0;
    Held& of_address_;
    Idle idle_{this};
};

}  // namespace moonpool::relay
