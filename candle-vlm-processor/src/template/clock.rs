//! `strftime_now`: dates for templates that tell the model what day it is.

use std::time::SystemTime;

use jiff::Timestamp;
use jiff::fmt::strtime;
use jiff::tz::Offset;

/// Formats a time as Python's `strftime` does, in UTC. What asks for a zone is an error, as the time has none.
pub(super) fn strftime(time: SystemTime, format: &str) -> Result<String, String> {
    let text = |timestamp| strtime::format(format, Offset::UTC.to_datetime(timestamp));
    Timestamp::try_from(time).and_then(text).map_err(|cause| format!("strftime_now({format:?}): {cause}"))
}
