//! Parts of a file (RFC 9110, 14): players and downloads that go on ask for them.

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::header::{ACCEPT_RANGES, CONTENT_RANGE, RANGE};
use http::{HeaderMap, Method, StatusCode};

/// A file, or the range of it that a request asks for. Several ranges are answered by the whole, which is allowed.
pub(crate) fn ranged(file: Bytes, method: &Method, head: &HeaderMap) -> Response {
    let length = file.len();
    let asked = head.get(RANGE).filter(|_| method == Method::GET);
    let asked = asked.and_then(|value| value.to_str().ok());
    let accepts = [(ACCEPT_RANGES, "bytes")];
    match asked.and_then(|asked| range_of(asked, length)) {
        None => (accepts, file).into_response(),
        Some(Ok((first, last))) => {
            let range = [(CONTENT_RANGE, format!("bytes {first}-{last}/{length}"))];
            (
                StatusCode::PARTIAL_CONTENT,
                accepts,
                range,
                file.slice(first..=last),
            )
                .into_response()
        }
        Some(Err(())) => {
            let range = [(CONTENT_RANGE, format!("bytes */{length}"))];
            (StatusCode::RANGE_NOT_SATISFIABLE, accepts, range).into_response()
        }
    }
}

/// The first and last byte of a range; `None`: it is none of one part, and is left out.
///
/// # Errors
/// It is beyond the file.
fn range_of(asked: &str, length: usize) -> Option<Result<(usize, usize), ()>> {
    let (first, last) = asked.strip_prefix("bytes=")?.split_once('-')?;
    let (first, last) = (first.trim(), last.trim());
    let range = match (first.is_empty(), last.is_empty()) {
        (true, true) => return None,
        (true, false) => {
            let count: usize = last.parse().ok()?;
            (length.saturating_sub(count), length.wrapping_sub(1), count > 0)
        }
        (false, true) => (first.parse().ok()?, length.wrapping_sub(1), true),
        (false, false) => {
            let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
            if last < first {
                return None;
            }
            (first, last.min(length.wrapping_sub(1)), true)
        }
    };
    let (first, last, has_bytes) = range;
    Some(match has_bytes && first < length {
        true => Ok((first, last)),
        false => Err(()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_those_of_the_file() {
        for (asked, range) in [
            ("bytes=0-1", Some(Ok((0, 1)))),
            ("bytes=4-", Some(Ok((4, 9)))),
            ("bytes=-3", Some(Ok((7, 9)))),
            ("bytes=-30", Some(Ok((0, 9)))),
            ("bytes=5-500", Some(Ok((5, 9)))),
            ("bytes=10-", Some(Err(()))),
            ("bytes=-0", Some(Err(()))),
            ("bytes=3-2", None),
            ("bytes=0-1,4-5", None),
            ("bytes=-", None),
            ("bytes=a-b", None),
            ("lines=0-1", None),
        ] {
            assert_eq!(range_of(asked, 10), range, "{asked}");
        }
        assert_eq!(range_of("bytes=0-", 0), Some(Err(())));
    }
}
