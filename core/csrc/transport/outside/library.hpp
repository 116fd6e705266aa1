// A shared library that is built outside of this tree and has a transport (moonpool_transport.h): how it is
// opened, and what of it is checked before any of its functions is called.
#pragma once

#include <moonpool_transport.h>

#include <memory>
#include <string>
#include <string_view>

#include "base/result.hpp"

namespace moonpool::transport::outside {

struct Library {
    std::string path;
    std::string name;
    moonpool_transport_table table{};  // of this build; what an older library has not is null

    // It stays open as long as this process lives: threads of the library may outlast its engines.
    static Result<std::shared_ptr<const Library>> open(const std::string& path);
    // The error says in one sentence what is wrong with the table.
    static Result<std::shared_ptr<const Library>> check(const std::string& path,
                                                        const moonpool_transport_table* table);

    std::string viable() const;  // why it cannot work on this host; empty: it can
    std::string said() const { return "the outside transport \"" + name + "\""; }
};

// A buffer for the library's sentences. It may have been filled with anything.
class Why {
   public:
    char* buffer() { return text_; }
    std::string text();  // UTF-8 on one line, "it gives no reason" when it is empty

   private:
    char text_[MOONPOOL_WHY_BYTES] = {};
};

// At most room bytes, of which the library may have left the zero away.
std::string text_of_library(const char* text, size_t room);

}  // namespace moonpool::transport::outside
