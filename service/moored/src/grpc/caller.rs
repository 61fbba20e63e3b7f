//! The caller of a request: its client, and its deadline.

use std::net::SocketAddr;
use std::time::Duration;

use engine::Error;
use engine::job::JobOptions;
use residency::Bytes;
use tokio::time::Instant;
use tonic::Request;

use super::convert::priority_in;
use super::limits::Client;
use super::status::short;
use crate::proto::v1;

/// The caller of a request.
pub(super) struct Caller {
    address: Option<SocketAddr>,
    deadline: Option<Instant>,
}

impl Caller {
    pub(super) fn of<T>(request: &Request<T>) -> Caller {
        let timeout = request
            .metadata()
            .get("grpc-timeout")
            .and_then(|v| v.to_str().ok())
            .and_then(timeout_of);
        Caller {
            address: request.remote_addr(),
            deadline: timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
        }
    }

    /// The client whose limits the call counts against.
    pub(super) fn client(&self) -> Client {
        self.address.map(|address| address.ip())
    }

    /// The client's name: as it gives it, or its address.
    ///
    /// # Errors
    /// When the name is too long.
    pub(super) fn name(&self, client_id: String) -> Result<String, Error> {
        short("client_id", &client_id)?;
        if !client_id.is_empty() {
            tracing::Span::current().record("client", &client_id);
            return Ok(client_id);
        }
        Ok(self
            .address
            .map_or_else(|| "unknown".to_owned(), |address| address.ip().to_string()))
    }

    /// The options of a job in the queue.
    ///
    /// # Errors
    /// When a name in the options is too long.
    pub(super) fn options(&self, options: Option<v1::JobOptions>) -> Result<JobOptions, Error> {
        let options = options.unwrap_or_default();
        short("options.card", &options.card)?;
        short("options.idempotency_key", &options.idempotency_key)?;
        Ok(JobOptions {
            client: self.name(options.client_id)?,
            account: self
                .client()
                .map(|address| address.to_string())
                .unwrap_or_default(),
            priority: priority_in(options.priority),
            patience: options.patience_ms.map(Duration::from_millis),
            allow_low_memory: options.allow_low_memory,
            headroom: Bytes(options.headroom_bytes.unwrap_or(0)),
            card_hint: options.card,
            idempotency_key: options.idempotency_key,
            detach: options.detach,
            deadline: self.deadline,
        })
    }
}

/// `grpc-timeout`: at most eight digits and a unit.
fn timeout_of(header: &str) -> Option<Duration> {
    let unit = header.chars().last()?;
    let digits = header.strip_suffix(unit).filter(|digits| digits.len() <= 8)?;
    let number: u32 = digits.parse().ok()?;
    let unit = match unit {
        'H' => Duration::from_secs(3600),
        'M' => Duration::from_secs(60),
        'S' => Duration::from_secs(1),
        'm' => Duration::from_millis(1),
        'u' => Duration::from_micros(1),
        'n' => Duration::from_nanos(1),
        _ => return None,
    };
    Some(unit * number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_in_every_unit() {
        assert_eq!(timeout_of("5S"), Some(Duration::from_secs(5)));
        assert_eq!(timeout_of("1500m"), Some(Duration::from_millis(1500)));
        assert_eq!(timeout_of("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(timeout_of("x"), None);
        assert_eq!(timeout_of(""), None);
        assert_eq!(
            timeout_of("99999999H"),
            Some(Duration::from_secs(99_999_999 * 3600))
        );
        assert_eq!(timeout_of("9999999999999999999S"), None);
    }
}
