// What SGLang's engines answer when prefill and decode are asked at once with the same body: decode's answer
// is the client's, but what it says of the prompt's logprobs only prefill knows. Pure.
#pragma once

#include <string>
#include <string_view>

namespace moonpool::relay {

// The data of the next event of a stream ("data: ...", up to a blank line), which is taken off; "": no whole
// event is there.
std::string_view next_event(std::string_view& stream);

// The status of an answer whose head says `status`: streams begin before anything can go wrong, and then say
// so in their first event.
int status_of_answer(int status, std::string_view answer);

// Puts the logprobs that prefill has of the prompt in front of those of decode, as SGLang's own router does.
// decode: an answer, of a batch an array of answers, or an event's data; prefill: its whole answer, or its
// whole stream. Returns decode as it is when either has none.
std::string with_prompt_logprobs(std::string_view decode, std::string_view prefill);

}  // namespace moonpool::relay
