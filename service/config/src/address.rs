//! The address of a service, as it is configured.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// The address of a service.
pub struct Address {
    /// URL with its scheme.
    pub url: String,
    pub encrypted: bool,
    /// Whether the service is on this machine.
    pub is_here: bool,
    /// Where a service must listen to answer at this address; `None` unless it is HTTP on loopback, with a port.
    pub listen: Option<SocketAddr>,
}

impl Address {
    /// The address as credentials are kept by it: scheme, host and port.
    pub fn key(&self) -> String {
        let uri: http::Uri = self.url.parse().unwrap_or_default();
        let (scheme, port) = match self.encrypted {
            true => ("https", 443),
            false => ("http", 80),
        };
        let host = uri.host().unwrap_or_default().to_ascii_lowercase();
        format!("{scheme}://{host}:{}", uri.port_u16().unwrap_or(port))
    }

    /// An address with or without its scheme.
    ///
    /// # Errors
    /// For people: why it is no address, and what to write.
    pub fn of(endpoint: &str) -> Result<Address, String> {
        let url = match endpoint.split_once("://") {
            Some(_) => endpoint.to_owned(),
            None => format!("http://{endpoint}"),
        };
        let wrong = || format!("{endpoint:?} is no address: write http://HOST:PORT, or https://HOST:PORT");
        let uri: http::Uri = url.parse().map_err(|_| wrong())?;
        let encrypted = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(wrong()),
        };
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
        let authority = uri.authority().map(|authority| authority.as_str());
        // `http` accepts any port, and also a name and a password before the host, which would be ignored.
        let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port > 0);
        let after_host = authority.and_then(|all| all.strip_prefix(uri.host().unwrap_or_default()));
        let is_whole =
            after_host.is_some_and(|after| after.is_empty() || after.strip_prefix(':').is_some_and(is_port));
        if host.is_empty() || !is_whole {
            return Err(wrong());
        }
        let is_localhost = host.eq_ignore_ascii_case("localhost");
        let ip = host
            .parse()
            .ok()
            .or(is_localhost.then_some(IpAddr::V4(Ipv4Addr::LOCALHOST)));
        let here = ip.filter(|ip| ip.to_canonical().is_loopback());
        Ok(Address {
            listen: here
                .filter(|_| !encrypted)
                .zip(uri.port_u16())
                .map(SocketAddr::from),
            is_here: here.is_some(),
            url,
            encrypted,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_host_and_at_most_a_port() {
        let url = |text: &str| Address::of(text).map(|address| address.url).ok();
        for right in [
            "http://box",
            "https://box.example:443/path",
            "http://[::1]:7",
            "http://1.2.3.4:7/",
            "http://7:7",
        ] {
            assert_eq!(url(right).as_deref(), Some(right));
        }
        assert_eq!(url("box:7").as_deref(), Some("http://box:7"));
        for wrong in [
            "",
            "http://",
            ":7",
            "box:",
            "box:0",
            "box:65536",
            "unix:/run/x",
            "ftp://box",
            "http://user:password@box",
            "http://a b",
            "http://[::1",
        ] {
            assert_eq!(url(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn a_key_has_the_scheme_the_host_and_the_port() {
        for (endpoint, key) in [
            ("https://Box", "https://box:443"),
            ("https://box:50051/", "https://box:50051"),
            ("HTTPS://[::1]:7", "https://[::1]:7"),
            ("box:50051", "http://box:50051"),
        ] {
            assert_eq!(Address::of(endpoint).unwrap().key(), key);
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
        ] {
            assert_eq!(listen(endpoint).as_deref(), Some(socket));
        }
        for elsewhere in [
            "http://gpu:50051",
            "https://127.0.0.1:50051",
            "http://10.0.0.1:1",
            "http://localhost",
        ] {
            assert_eq!(listen(elsewhere), None, "{elsewhere}");
        }
    }
}
