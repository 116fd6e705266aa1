// What SGLang's engines answer when prefill and decode are asked at once with the same body: decode's answer
// is the client's, but what it says of the prompt's logprobs only prefill knows. Pure.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace moonpool::relay {

// The data of the next event of a stream ("data: ...", up to a blank line), which is taken off; "": no whole
// event is there.
std::string_view next_event(std::string_view& stream);

// The status of an answer whose head says `status`: streams begin before anything can go wrong, and then say
// so in their first event.
int status_of_answer(int status, std::string_view answer);

// The logprobs that prefill has of the prompt, or of each of a batch: read once, however many events they are
// put into. Points into the answer it was made of.
class PromptLogprobs {
   public:
    PromptLogprobs() = default;
    // prefill: its whole answer, of a batch an array of answers, or its whole stream.
    explicit PromptLogprobs(std::string_view prefill);

    // Puts them in front of those of decode, as SGLang's own router does. decode: an answer, of a batch an
    // array of answers, or an event's data. Returns decode as it is when either has none.
    std::string put_into(std::string_view decode) const;

   private:
    // Of one prompt: what stands between the brackets of each array that tells of it.
    struct Texts {
        std::array<std::optional<std::string_view>, 3> of;
        std::string put_into(std::string_view decode) const;
    };
    static Texts texts_of(std::string_view answer);

    bool stream_ = false, batch_ = false;
    std::vector<Texts> each_;
    std::map<std::string_view, Texts> of_index_;  // of a stream; "": its events have none
};

}  // namespace moonpool::relay
