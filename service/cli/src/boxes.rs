//! What a proxy before several boxes needs to know of a call: its model, so that calls of equal models go to one box
//! (docs/MANY_BOXES.md). Without a proxy nobody reads it.

use api::v1;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use tonic::Request;
use tonic::metadata::MetadataValue;

/// The model of a call, without formats and adapters.
const MODEL_HEADER: &str = "x-moored-model";

/// Most bytes of a model's name in the header. Those that are equal so far are at one box.
const MOST_BYTES: usize = 256;

/// What is escaped in a name, as the Python client does: what is no plain letter, digit or sign.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~')
    .remove(b'/')
    .remove(b':')
    .remove(b'@')
    .remove(b'!')
    .remove(b'$')
    .remove(b'\'')
    .remove(b'(')
    .remove(b')')
    .remove(b'*')
    .remove(b',')
    .remove(b';')
    .remove(b'=')
    .remove(b'&');

/// A call that says its model, if it names one.
pub(super) fn of_model<T>(message: T, model: Option<&str>) -> Request<T> {
    let mut request = Request::new(message);
    // Formats and adapters follow a plus.
    let base = model
        .and_then(|model| model.split('+').next())
        .unwrap_or_default();
    let mut name = utf8_percent_encode(base, ESCAPED).to_string();
    name.truncate(MOST_BYTES);
    if !name.is_empty()
        && let Ok(name) = MetadataValue::try_from(name)
    {
        request.metadata_mut().insert(MODEL_HEADER, name);
    }
    request
}

/// The id of a model that a request names.
pub(super) fn id_of(model: Option<&v1::ModelRef>) -> Option<&str> {
    model.map(|model| model.id.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(model: Option<&str>) -> Option<String> {
        let request = of_model((), model);
        let value = request.metadata().get(MODEL_HEADER)?;
        Some(value.to_str().expect("plain letters").to_owned())
    }

    #[test]
    fn a_call_says_its_model_without_formats_as_the_python_client_does() {
        assert_eq!(header(Some("owner/name+8-bit")).as_deref(), Some("owner/name"));
        assert_eq!(
            header(Some("größe & co/a b")).as_deref(),
            Some("gr%C3%B6%C3%9Fe%20&%20co/a%20b")
        );
        assert_eq!(
            header(Some(&"x".repeat(300))).map(|name| name.len()),
            Some(MOST_BYTES)
        );
    }

    #[test]
    fn a_call_of_no_model_says_none() {
        assert_eq!(header(None), None);
        assert_eq!(header(Some("")), None);
    }
}
