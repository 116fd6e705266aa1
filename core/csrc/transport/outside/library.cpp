#include "transport/outside/library.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/utf8.hpp"

namespace moonpool::transport::outside {

namespace {

// The end of what every library of version 1 has; later functions are optional.
constexpr size_t kTableBytesMin =
    offsetof(moonpool_transport_table, destroy_link) + sizeof(moonpool_transport_table::destroy_link);

Error wrong(const std::string& path, const std::string& what) {
    return Error{Code::kInvalidArgument, "the outside transport " + path + " is not used: " + what};
}

// The name, read no further than it may be long.
bool is_name(const char* name) {
    size_t n = ::strnlen(name, MOONPOOL_TRANSPORT_NAME_BYTES_MAX + 1);
    return n != 0 && n <= MOONPOOL_TRANSPORT_NAME_BYTES_MAX && std::all_of(name, name + n, [](char c) {
               return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
           });
}

}  // namespace

std::string text_of_library(const char* text, size_t room) {
    std::string said(text, ::strnlen(text, room));
    bool utf8 = is_utf8(said);
    for (char& c : said) {
        auto byte = static_cast<unsigned char>(c);
        if (byte < 0x20 || byte == 0x7f || (!utf8 && byte >= 0x80)) c = '?';
    }
    return said;
}

std::string Why::text() {
    std::string said = text_of_library(text_, sizeof(text_));
    return said.empty() ? "it gives no reason" : said;
}

Result<std::shared_ptr<const Library>> Library::open(const std::string& path) {
    // Another path is looked up where the loader likes.
    if (!path.starts_with('/')) {
        return Error{Code::kInvalidArgument,
                     "an outside transport is named by the absolute path of its "
                     "library, not by \"" +
                         path + "\""};
    }
    void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        const char* why = ::dlerror();
        return wrong(path, why == nullptr ? "it cannot be loaded" : why);
    }
    auto entry = reinterpret_cast<moonpool_transport_v1_function>(::dlsym(handle, MOONPOOL_TRANSPORT_SYMBOL));
    if (entry == nullptr) return wrong(path, "it does not export " MOONPOOL_TRANSPORT_SYMBOL);
    return check(path, entry());
}

Result<std::shared_ptr<const Library>> Library::check(const std::string& path,
                                                      const moonpool_transport_table* table) {
    if (table == nullptr) return wrong(path, MOONPOOL_TRANSPORT_SYMBOL " returned no table");
    if (table->struct_bytes < kTableBytesMin) {
        return wrong(path, "its table has " + std::to_string(table->struct_bytes) + " bytes, and needs " +
                               std::to_string(kTableBytesMin));
    }
    if (table->version != MOONPOOL_TRANSPORT_VERSION) {
        return wrong(path, "its table is of version " + std::to_string(table->version) +
                               ", this engine's of " + std::to_string(MOONPOOL_TRANSPORT_VERSION));
    }
    if (table->name == nullptr || !is_name(table->name)) {
        return wrong(path, "its name is not one of 1 to " +
                               std::to_string(MOONPOOL_TRANSPORT_NAME_BYTES_MAX) +
                               " bytes of a to z, 0 to 9 and _");
    }
    auto library = std::make_shared<Library>();
    library->path = path;
    library->name = table->name;
    std::memcpy(&library->table, table, std::min<size_t>(table->struct_bytes, sizeof(library->table)));
    const moonpool_transport_table& t = library->table;
    const std::pair<const char*, bool> functions[] = {{"create", t.create != nullptr},
                                                      {"offer", t.offer != nullptr},
                                                      {"add_region", t.add_region != nullptr},
                                                      {"revoke_region", t.revoke_region != nullptr},
                                                      {"is_drained", t.is_drained != nullptr},
                                                      {"shut_out", t.shut_out != nullptr},
                                                      {"is_out", t.is_out != nullptr},
                                                      {"close", t.close != nullptr},
                                                      {"destroy", t.destroy != nullptr},
                                                      {"connect", t.connect != nullptr},
                                                      {"run", t.run != nullptr},
                                                      {"close_link", t.close_link != nullptr},
                                                      {"destroy_link", t.destroy_link != nullptr}};
    for (const auto& [name, there] : functions) {
        if (!there) return wrong(path, std::string("its function ") + name + " is null");
    }
    return std::shared_ptr<const Library>(std::move(library));
}

std::string Library::viable() const {
    if (table.viable == nullptr) return "";
    Why why;
    return table.viable(why.buffer()) == MOONPOOL_OK ? "" : why.text();
}

}  // namespace moonpool::transport::outside
