#include "ssd/log.hpp"

#include "ssd/engine.hpp"

namespace moonpool::ssd {

Log::Log(std::unique_ptr<Engine> engine) : engine_(std::move(engine)) {}
Log::~Log() = default;

Result<std::unique_ptr<Log>> Log::open(LogOptions options) {
    Result<std::unique_ptr<Engine>> engine = Engine::open(std::move(options));
    if (!engine) return engine.error();
    return std::unique_ptr<Log>(new Log(std::move(*engine)));
}

uint32_t Log::space(std::string_view identity) { return engine_->space(identity); }
void Log::leave_space(uint32_t space) { engine_->leave_space(space); }
std::optional<Found> Log::find(const Key& key, bool with_parent) { return engine_->find(key, with_parent); }
bool Log::write(const Key& key, std::string_view parent, std::vector<std::span<const std::byte>> parts,
                uint32_t crc, Done done) {
    return engine_->write(key, parent, std::move(parts), crc, std::move(done));
}
bool Log::read(const Key& key, std::span<std::byte> to, Done done) {
    return engine_->read(key, to, std::move(done));
}
bool Log::remove(const Key& key) { return engine_->remove(key); }
void Log::sync(Done done) { engine_->sync(std::move(done)); }
uint32_t Log::list(uint32_t space, uint32_t cursor, uint32_t scan, std::vector<Listed>& out) const {
    return engine_->list(space, cursor, scan, out);
}
uint32_t Log::hashes(uint32_t cursor, uint32_t scan, std::vector<Hash128>& out) const {
    return engine_->hashes(cursor, scan, out);
}
std::vector<Hash128> Log::take_lost(uint32_t scan) { return engine_->take_lost(scan); }
std::optional<uint64_t> Log::sequence(const Hash128& hash) const { return engine_->sequence(hash); }
bool Log::remove(const Hash128& hash) { return engine_->remove(hash); }
void Log::close() { engine_->close(); }
bool Log::accepts_writes() const { return engine_->accepts_writes(); }
std::string Log::trouble() const { return engine_->trouble(); }
uint64_t Log::object_bytes_max() const { return engine_->object_bytes_max(); }
const std::string& Log::directory() const { return engine_->directory(); }
std::vector<std::pair<const char*, uint64_t>> Log::counters() const { return engine_->counters(); }
const char* Log::io_name() const { return engine_->io_name(); }
std::string Log::io_reason() const { return engine_->io_reason(); }
bool Log::check_integrity() const { return engine_->check_integrity(); }

}  // namespace moonpool::ssd
