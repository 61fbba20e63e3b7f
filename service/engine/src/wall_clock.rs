//! A moment of this process's clock, kept as a time of the wall clock: it means the same in another process.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};
use tokio::time::Instant;

/// Writes the time since 1970 (UTC).
pub(crate) fn serialize<S: Serializer>(moment: &Option<Instant>, serializer: S) -> Result<S::Ok, S::Error> {
    let (now, today) = (Instant::now(), since_epoch(SystemTime::now()));
    let at = moment.map(|moment| match moment.checked_duration_since(now) {
        Some(left) => today.saturating_add(left),
        None => today.saturating_sub(now.duration_since(moment)),
    });
    at.serialize(serializer)
}

/// Reads what [`serialize`] wrote. A time in the past is now.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Instant>, D::Error> {
    let at = Option::<Duration>::deserialize(deserializer)?;
    let today = since_epoch(SystemTime::now());
    Ok(at.and_then(|at| Instant::now().checked_add(at.saturating_sub(today))))
}

fn since_epoch(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}
