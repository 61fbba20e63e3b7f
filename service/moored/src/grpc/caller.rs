//! Who calls: for fair shares, and until when they wait.

use std::net::SocketAddr;
use std::time::Duration;

use engine::job::JobOptions;
use tokio::time::Instant;
use tonic::Request;

use super::convert::priority_in;
use crate::proto::v1;

/// Who calls, and until when they wait.
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
            deadline: timeout.map(|t| Instant::now() + t),
        }
    }

    pub(super) fn options(&self, options: Option<v1::JobOptions>) -> JobOptions {
        let options = options.unwrap_or_default();
        let client = if options.client_id.is_empty() {
            self.address
                .map(|address| address.ip().to_string())
                .unwrap_or_else(|| "unknown".to_owned())
        } else {
            options.client_id
        };
        JobOptions {
            client,
            priority: priority_in(options.priority),
            patience: options.patience_ms.map(Duration::from_millis),
            allow_low_memory: options.allow_low_memory,
            card_hint: options.card,
            idempotency_key: options.idempotency_key,
            detach: options.detach,
            deadline: self.deadline,
        }
    }
}

/// `grpc-timeout`: at most eight digits and a unit.
fn timeout_of(header: &str) -> Option<Duration> {
    let unit = header.chars().last()?;
    let number: u64 = header.strip_suffix(unit)?.parse().ok()?;
    Some(match unit {
        'H' => Duration::from_secs(number * 3600),
        'M' => Duration::from_secs(number * 60),
        'S' => Duration::from_secs(number),
        'm' => Duration::from_millis(number),
        'u' => Duration::from_micros(number),
        'n' => Duration::from_nanos(number),
        _ => return None,
    })
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
    }
}
