//! Requests that a page of another site has a browser send. A browser reaches this machine and its network for any page, so who
//! only checks addresses would take its requests for the user's.

use std::net::IpAddr;

use tonic::codegen::http::header::{HOST, ORIGIN};
use tonic::codegen::http::uri::Authority;
use tonic::codegen::http::{HeaderMap, Request};

use crate::protocol::is_from_page;
use crate::refusal::Refusal;

/// Ends of names that no public domain has.
const LOCAL: [&str; 5] = [".localhost", ".local", ".internal", ".lan", ".home.arpa"];

/// Refuses a request that a page of another site may have sent. `has_token`: it carries a token that counts, or needs none.
///
/// # Errors
/// [`Refusal::OtherSite`].
pub(crate) fn refuse_other_sites<B>(
    request: &Request<B>,
    is_grpc: bool,
    has_token: bool,
) -> Result<(), Refusal> {
    // Browsers speak HTTP/2 only in TLS, where a certificate says whose address it is.
    if is_grpc && !is_from_page(request) {
        return Ok(());
    }
    // HTTP/2 has it in the address.
    let authority = request.uri().authority().map(|authority| authority.as_str());
    check(authority, request.headers(), has_token).map_err(Refusal::OtherSite)
}

/// # Errors
/// Why a request is refused.
fn check(authority: Option<&str>, headers: &HeaderMap, has_token: bool) -> Result<(), &'static str> {
    if headers.get_all(HOST).iter().count() > 1 {
        return Err("this request names two hosts: send one");
    }
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    let host = authority.or_else(|| text(HOST)).unwrap_or_default();
    // Browsers send it with all requests that change something, and with those that pages send to other sites.
    if let Some(origin) = text(ORIGIN) {
        let of_origin = origin.split_once("://").map(|(_, host)| host);
        if !of_origin.is_some_and(|of_origin| of_origin.eq_ignore_ascii_case(host)) {
            return Err(
                "a page of another site sent this request: send it from a program, or from a page of this address",
            );
        }
    }
    // A page may give a name of its own the address of this machine, and then is of the same site. No page knows a token.
    let is_local = host
        .parse::<Authority>()
        .is_ok_and(|authority| is_local(authority.host()));
    if !has_token && !is_local {
        return Err(
            "without a token the service answers to its address, to localhost, and to names without a dot: use one of these, or a token",
        );
    }
    Ok(())
}

/// Whether a host is an address, or a name that no public domain has.
fn is_local(host: &str) -> bool {
    let host = host.to_ascii_lowercase();
    // An address with colons is in brackets.
    let address = host.trim_start_matches('[').trim_end_matches(']');
    address.parse::<IpAddr>().is_ok()
        || (!host.is_empty() && !host.contains('.'))
        || LOCAL.iter().any(|end| host.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(host: &'static str, origin: Option<&'static str>, has_token: bool) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, host.parse().unwrap());
        if let Some(origin) = origin {
            headers.insert(ORIGIN, origin.parse().unwrap());
        }
        check(None, &headers, has_token).is_ok()
    }

    #[test]
    fn a_page_of_another_site_is_refused() {
        assert!(allowed("127.0.0.1:50051", None, false));
        assert!(allowed("127.0.0.1:50051", Some("http://127.0.0.1:50051"), false));
        for origin in [
            "http://evil.example",
            "null",
            "http://127.0.0.1:8188",
            "http://127.0.0.1",
        ] {
            assert!(!allowed("127.0.0.1:50051", Some(origin), false), "{origin}");
            assert!(!allowed("127.0.0.1:50051", Some(origin), true), "{origin}");
        }
    }

    #[test]
    fn a_name_that_a_page_may_have_taken_needs_a_token() {
        for host in [
            "localhost:50051",
            "[::1]:50051",
            "10.0.0.7",
            "moored:50051",
            "box.local",
            "a.localhost:1",
        ] {
            assert!(allowed(host, None, false), "{host}");
        }
        for host in [
            "evil.example:50051",
            "127.0.0.1.evil.example",
            "",
            "local.example",
        ] {
            assert!(!allowed(host, None, false), "{host}");
            assert!(allowed(host, None, true), "{host}");
        }
        let headers = HeaderMap::new();
        assert!(check(Some("127.0.0.1:50051"), &headers, false).is_ok());
        assert!(check(Some("evil.example"), &headers, false).is_err());
    }
}
