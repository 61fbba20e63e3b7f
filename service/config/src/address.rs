//! The address of a service, as it is configured. The Python client reads addresses by the same rule; `client-py/tests/addresses.json` holds
//! the tests of both to it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The port of a service without TLS, where none is named: that on which it listens by itself.
const PORT: u16 = 50051;
/// The port of `https://`, where none is named: that of the proxy before it.
const HTTPS_PORT: u16 = 443;

/// The address of a service.
pub struct Address {
    /// Scheme, host and port, by which credentials are kept too: `https://box:50051`.
    pub url: String,
    pub encrypted: bool,
    /// Whether the service is on this machine.
    pub is_here: bool,
    /// Where a service must listen to answer at this address; `None` unless it is HTTP on loopback.
    pub listen: Option<SocketAddr>,
}

impl Address {
    /// An address with or without its scheme and its port.
    ///
    /// # Errors
    /// For people: why it is no address, and what to write.
    pub fn of(endpoint: &str) -> Result<Address, String> {
        let wrong = || format!("{endpoint:?} is no address: write http://HOST:PORT, or https://HOST:PORT");
        let (encrypted, rest) = match endpoint.trim().split_once("://") {
            None => (false, endpoint.trim()),
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => {
                (false, rest.trim_end_matches('/'))
            }
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("https") => {
                (true, rest.trim_end_matches('/'))
            }
            Some(_) => return Err(wrong()),
        };
        let has_scheme = endpoint.contains("://");
        let (host, port) = match rest.parse::<Ipv6Addr>() {
            Ok(_) if !has_scheme => (format!("[{rest}]"), None),
            _ => host_and_port(rest).ok_or_else(wrong)?,
        };
        let port = port.unwrap_or(match encrypted {
            true => HTTPS_PORT,
            false => PORT,
        });
        let host = host.to_ascii_lowercase();
        let ip = match host.as_str() {
            "localhost" => Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            host => host.trim_matches(['[', ']']).parse().ok(),
        };
        let here = ip.filter(|ip| ip.to_canonical().is_loopback());
        let scheme = match encrypted {
            true => "https",
            false => "http",
        };
        Ok(Address {
            listen: here
                .filter(|_| !encrypted)
                .map(|here| SocketAddr::from((here, port))),
            is_here: here.is_some(),
            url: format!("{scheme}://{host}:{port}"),
            encrypted,
        })
    }
}

/// A host, with the brackets of an IPv6 address, and its port; `None` for another text, such as one with a name and a password.
fn host_and_port(text: &str) -> Option<(String, Option<u16>)> {
    let of_name = |letter: char| letter.is_ascii_alphanumeric() || "-._".contains(letter);
    let (host, after) = match text.strip_prefix('[') {
        Some(rest) => {
            let (ip, after) = rest.split_once(']')?;
            ip.parse::<Ipv6Addr>().ok()?;
            (format!("[{ip}]"), after)
        }
        None => {
            let end = text.find(|letter| !of_name(letter)).unwrap_or(text.len());
            (text[..end].to_owned(), &text[end..])
        }
    };
    let port = match after.strip_prefix(':') {
        None if after.is_empty() => None,
        None => return None,
        Some(digits) if digits.bytes().all(|digit| digit.is_ascii_digit()) => {
            Some(digits.parse::<u16>().ok().filter(|port| *port > 0)?)
        }
        Some(_) => return None,
    };
    (!host.is_empty()).then_some((host, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_the_python_client_reads_them() {
        #[derive(serde::Deserialize)]
        struct Case {
            written: String,
            key: Option<String>,
        }
        let cases: Vec<Case> =
            serde_json::from_str(include_str!("../../../client-py/tests/addresses.json")).unwrap();
        assert!(cases.len() > 30);
        for case in cases {
            let read = Address::of(&case.written).ok().map(|address| address.url);
            assert_eq!(read, case.key, "{:?}", case.written);
        }
        // The Python client has sockets and this one does not.
        assert!(Address::of("unix:/run/x").is_err());
    }

    #[test]
    fn an_address_is_read_again_as_itself() {
        for endpoint in ["box", "https://[::1]", "HTTP://BOX:7"] {
            let url = Address::of(endpoint).unwrap().url;
            assert_eq!(Address::of(&url).unwrap().url, url);
        }
    }

    #[test]
    fn a_service_can_be_started_for_a_loopback_http_address() {
        let listen = |endpoint: &str| {
            let address = Address::of(endpoint).unwrap().listen;
            address.map(|address| address.to_string())
        };
        for (endpoint, socket) in [
            ("http://127.0.0.1:50051", "127.0.0.1:50051"),
            ("localhost:7", "127.0.0.1:7"),
            ("http://[::1]:7/", "[::1]:7"),
            ("localhost", "127.0.0.1:50051"),
        ] {
            assert_eq!(listen(endpoint).as_deref(), Some(socket));
        }
        for elsewhere in ["http://gpu:50051", "https://127.0.0.1:50051", "http://10.0.0.1:1"] {
            assert_eq!(listen(elsewhere), None, "{elsewhere}");
        }
    }
}
