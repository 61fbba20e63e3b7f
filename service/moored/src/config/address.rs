//! The address of a service, as it is configured.

use std::net::IpAddr;

use tonic::codegen::http;

/// Where a service is.
pub(crate) struct Address {
    /// URL with its scheme.
    pub(crate) url: String,
    pub(crate) encrypted: bool,
    /// Whether it is this machine.
    pub(crate) is_here: bool,
}

impl Address {
    /// An address with or without its scheme.
    ///
    /// # Errors
    /// For people: what it is not, and what to write.
    pub(crate) fn of(endpoint: &str) -> Result<Address, String> {
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
        if host.is_empty() {
            return Err(wrong());
        }
        let is_here = match host.parse::<IpAddr>() {
            Ok(address) => address.to_canonical().is_loopback(),
            Err(_) => host.eq_ignore_ascii_case("localhost"),
        };
        Ok(Address {
            url,
            encrypted,
            is_here,
        })
    }
}
