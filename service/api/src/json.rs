//! Fields of messages that JSON has in another form.

use bytes::Bytes;
use prost_types::Duration;
use serde::{Serialize, Serializer};

use crate::v1;

/// One object: the kind of the event as `event`, and its fields beside those that all events have.
impl Serialize for v1::Event {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Flat<'a> {
            #[serde(flatten)]
            event: Option<&'a v1::event::Event>,
            job_id: &'a str,
            at_ms: u64,
        }
        let flat = Flat {
            event: self.event.as_ref(),
            job_id: &self.job_id,
            at_ms: self.at_ms,
        };
        flat.serialize(serializer)
    }
}

/// Bytes as their number: pictures and samples are no text.
pub(crate) fn length<S: Serializer>(bytes: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(bytes.len() as u64)
}

/// As [`length`], null where there are none.
pub(crate) fn length_if_any<S: Serializer>(bytes: &Option<Bytes>, serializer: S) -> Result<S::Ok, S::Error> {
    match bytes {
        Some(bytes) => length(bytes, serializer),
        None => serializer.serialize_none(),
    }
}

/// A priority by its name: `low`, `normal`, `high`.
pub(crate) fn priority<S: Serializer>(priority: &i32, serializer: S) -> Result<S::Ok, S::Error> {
    let priority = v1::Priority::try_from(*priority).unwrap_or_default();
    serializer.serialize_str(&priority.as_str_name().to_lowercase())
}

/// A time in seconds.
pub(crate) fn seconds<S: Serializer>(time: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    match time {
        Some(time) => serializer.serialize_f64(time.seconds as f64 + f64::from(time.nanos) * 1e-9),
        None => serializer.serialize_none(),
    }
}
