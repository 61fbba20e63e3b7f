//! What requests have in common: how JSON and forms are read, names of models, and sizes.

use axum::RequestExt as _;
use axum::body::Bytes as Body;
use axum::extract::{FromRequest, Multipart, Request};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use calls::ModelRef;
use http::StatusCode;
use http::header::CONTENT_TYPE;
use model::Sampler;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize as _, Deserializer};
use serde_json::{Map, Value};

use crate::errors::{Failure, unread};

/// Names of OpenAI's own models: clients send them by default. They stand for the service's default model.
const OTHERS: [&str; 4] = ["dall-e-", "gpt-image-", "chatgpt-image-", "sora-"];

/// The model of a name as a client sends it. A format may follow: `owner/name+4-bit`.
pub(crate) fn model_of(name: Option<&str>) -> ModelRef {
    let name = name.unwrap_or_default().trim();
    if OTHERS.iter().any(|other| name.starts_with(other)) {
        return ModelRef::default();
    }
    ModelRef {
        id: name.to_owned(),
        ..ModelRef::default()
    }
}

/// Width and height; zeros for `auto`, which is the model's own.
///
/// # Errors
/// Where it is neither.
pub(crate) fn size_of(size: Option<&str>) -> Result<(u32, u32), Failure> {
    let size = size.unwrap_or_default().trim();
    if size.is_empty() || size == "auto" {
        return Ok((0, 0));
    }
    let sides = size.split_once(['x', 'X']);
    let sides = sides.and_then(|(width, height)| Some((width.parse().ok()?, height.parse().ok()?)));
    let sides = sides.filter(|&(width, height)| width > 0 && height > 0);
    sides.ok_or_else(|| Failure::field("size", format!("{size:?} is no size: write 1024x1024, or auto")))
}

/// A prompt, which may not be missing.
///
/// # Errors
/// Where it is empty.
pub(crate) fn prompt_of(prompt: &str) -> Result<String, Failure> {
    match prompt.trim().is_empty() {
        true => Err(Failure::field("prompt", "is missing: say what is to be made")),
        false => Ok(prompt.to_owned()),
    }
}

/// A file in base64, or as a `data:` address.
///
/// # Errors
/// Where it is neither.
pub(crate) fn decoded(field: &str, text: &str) -> Result<Bytes, Failure> {
    let encoded = match text.split_once("base64,") {
        Some((head, encoded)) if head.starts_with("data:") => encoded,
        _ => text,
    };
    let data = BASE64_STANDARD.decode(encoded.trim());
    data.map(Bytes::from).map_err(|_| {
        let problem =
            "is no picture in base64, and no data: address: send the picture itself, not where it is";
        Failure::field(field, problem)
    })
}

/// A request in JSON.
pub(crate) struct Sent<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Sent<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, _state: &S) -> Result<Sent<T>, Failure> {
        let kind = request.headers().get(CONTENT_TYPE);
        let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        let kind = kind
            .split(';')
            .next()
            .unwrap_or_default()
            .trim()
            .to_ascii_lowercase();
        if kind != "application/json" && !kind.ends_with("+json") {
            let problem = "send JSON, with the header Content-Type: application/json".to_owned();
            return Err(unread(StatusCode::UNSUPPORTED_MEDIA_TYPE, problem));
        }
        let body: Body = request.extract().await?;
        if body
            .trim_ascii_start()
            .first()
            .is_some_and(|first| *first != b'{')
        {
            // Else a list would be read as fields in their order.
            return Err(Failure::field(
                "body",
                "is not a JSON object: send one with the fields of the request",
            ));
        }
        let mut json = serde_json::Deserializer::from_slice(&body);
        let read = read_fields(&mut json)?;
        json.end().map_err(|problem| not_json(&problem))?;
        Ok(Sent(read))
    }
}

/// Reads the fields of a request.
fn read_fields<'de, T: DeserializeOwned, D: Deserializer<'de, Error = serde_json::Error>>(
    fields: D,
) -> Result<T, Failure> {
    serde_path_to_error::deserialize(fields).map_err(|wrong| {
        let path = wrong.path().to_string();
        match wrong.inner() {
            problem if !problem.is_data() => not_json(problem),
            problem if path == "." => Failure::field("body", problem.to_string()),
            problem => Failure::field(&path, format!("has a wrong value: {problem}")),
        }
    })
}

fn not_json(problem: &serde_json::Error) -> Failure {
    unread(
        StatusCode::BAD_REQUEST,
        format!("the body is not JSON: {problem}"),
    )
}

/// The fields of a form: texts by name, and files in their order.
#[derive(Debug, Default)]
pub(crate) struct Form {
    texts: Map<String, Value>,
    files: Vec<(String, Bytes)>,
}

impl Form {
    /// Reads a form, in which these fields may be files.
    ///
    /// # Errors
    /// Where it is broken off, or damaged, or a text is a file.
    pub(crate) async fn read(request: Request, files: &[&str]) -> Result<Form, Failure> {
        let mut multipart: Multipart = request.extract().await?;
        let mut form = Form::default();
        while let Some(field) = multipart.next_field().await? {
            let name = field.name().unwrap_or_default();
            // As clients write lists, and objects with a picture.
            let name = name
                .trim_end_matches("[]")
                .trim_end_matches("[image_url]")
                .to_owned();
            let is_file = field.file_name().is_some();
            let data = field.bytes().await?;
            if is_file && files.contains(&name.as_str()) {
                form.files.push((name, data));
                continue;
            }
            if is_file {
                return Err(Failure::field(&name, "is a file: send it as text"));
            }
            let Ok(text) = String::from_utf8(data.to_vec()) else {
                return Err(Failure::field(&name, "is not text in UTF-8"));
            };
            if files.contains(&name.as_str()) && !text.trim().is_empty() {
                let data = decoded(&name, &text)?;
                form.files.push((name, data));
            } else {
                form.texts.insert(name, Value::String(text));
            }
        }
        Ok(form)
    }

    /// Its texts as the fields of a request. Numbers and switches are read by [`lenient`].
    ///
    /// # Errors
    /// Where a field has a wrong value.
    pub(crate) fn fields<T: DeserializeOwned>(&mut self) -> Result<T, Failure> {
        let mut texts = std::mem::take(&mut self.texts);
        texts.retain(|_, text| text.as_str().is_some_and(|text| !is_nothing(text)));
        read_fields(Value::Object(texts))
    }

    /// The files of a name, in their order.
    pub(crate) fn files(&mut self, name: &str) -> Vec<Bytes> {
        let (found, left) = std::mem::take(&mut self.files)
            .into_iter()
            .partition::<Vec<_>, _>(|(of, _)| of == name);
        self.files = left;
        found.into_iter().map(|(_, data)| data).collect()
    }
}

/// What forms send for a field that is left out.
fn is_nothing(text: &str) -> bool {
    matches!(text.trim(), "" | "null" | "None")
}

/// A value that clients of several languages write differently: `30`, `30.0`, `"30"`; `true`, `"True"`, `"1"`.
pub(crate) trait Lenient: Sized {
    const WORDS: &'static str;
    fn of(value: &Value) -> Option<Self>;
}

/// A whole number, which some languages only have as a fraction.
fn whole(value: &Value) -> Option<u64> {
    let number = |text: &str| text.trim().parse().ok();
    let fraction =
        |value: f64| (value.fract() == 0.0 && (0.0..9.0e15).contains(&value)).then_some(value as u64);
    match value {
        Value::Number(given) => given.as_u64().or_else(|| given.as_f64().and_then(fraction)),
        Value::String(text) => number(text).or_else(|| text.trim().parse().ok().and_then(fraction)),
        _ => None,
    }
}

impl Lenient for u32 {
    const WORDS: &'static str = "a whole number";
    fn of(value: &Value) -> Option<u32> {
        whole(value)?.try_into().ok()
    }
}

impl Lenient for u64 {
    const WORDS: &'static str = "a whole number";
    fn of(value: &Value) -> Option<u64> {
        whole(value)
    }
}

impl Lenient for f32 {
    const WORDS: &'static str = "a number";
    fn of(value: &Value) -> Option<f32> {
        let number = match value {
            Value::Number(given) => given.as_f64()? as f32,
            Value::String(text) => text.trim().parse().ok()?,
            _ => return None,
        };
        number.is_finite().then_some(number)
    }
}

impl Lenient for bool {
    const WORDS: &'static str = "true or false";
    fn of(value: &Value) -> Option<bool> {
        match value {
            Value::Bool(given) => Some(*given),
            Value::String(text) => match text.trim().to_ascii_lowercase().as_str() {
                "true" | "1" => Some(true),
                "false" | "0" => Some(false),
                _ => None,
            },
            Value::Number(given) if given.as_u64() == Some(1) => Some(true),
            Value::Number(given) if given.as_u64() == Some(0) => Some(false),
            _ => None,
        }
    }
}

impl Lenient for Sampler {
    const WORDS: &'static str = "a sampler: write euler, euler_ancestral or dpmpp_2m_karras";
    fn of(value: &Value) -> Option<Sampler> {
        value.as_str()?.trim().parse().ok()
    }
}

/// Reads a value as [`Lenient`] says; nothing where it is null.
pub(crate) fn lenient<'de, T: Lenient, D: Deserializer<'de>>(given: D) -> Result<Option<T>, D::Error> {
    let value = Value::deserialize(given)?;
    if value.is_null() || value.as_str().is_some_and(is_nothing) {
        return Ok(None);
    }
    let read = T::of(&value).map(Some);
    read.ok_or_else(|| D::Error::custom(format!("{value} is not {}", T::WORDS)))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Default, PartialEq, Deserialize)]
    #[serde(default)]
    struct Fields {
        #[serde(deserialize_with = "lenient")]
        count: Option<u32>,
        #[serde(deserialize_with = "lenient")]
        scale: Option<f32>,
        #[serde(deserialize_with = "lenient")]
        stream: Option<bool>,
    }

    fn read(value: Value) -> Result<Fields, Failure> {
        read_fields(value)
    }

    #[test]
    fn numbers_and_switches_are_read_as_languages_write_them() {
        for count in [json!(30), json!(30.0), json!("30"), json!(" 30.0 ")] {
            assert_eq!(read(json!({"count": count})).unwrap().count, Some(30));
        }
        for nothing in [json!(null), json!(""), json!("None")] {
            assert_eq!(read(json!({"count": nothing})).unwrap(), Fields::default());
        }
        for (stream, is_on) in [(json!(true), true), (json!("True"), true), (json!("0"), false)] {
            assert_eq!(read(json!({"stream": stream})).unwrap().stream, Some(is_on));
        }
        assert_eq!(read(json!({"scale": "3.5"})).unwrap().scale, Some(3.5));
        for (field, wrong) in [
            ("count", json!(1.5)),
            ("count", json!(-1)),
            ("count", json!(5_000_000_000_u64)),
            ("count", json!([1])),
            ("scale", json!("NaN")),
            ("scale", json!("inf")),
            ("stream", json!("maybe")),
        ] {
            let refused = read(json!({field: wrong})).unwrap_err();
            assert_eq!(refused.words.param.as_deref(), Some(field));
        }
    }

    #[test]
    fn a_size_has_two_sides_that_are_not_0() {
        assert_eq!(size_of(Some("640x480")).unwrap(), (640, 480));
        assert_eq!(size_of(Some("auto")).unwrap(), (0, 0));
        for wrong in ["0x0", "0x64", "64", "64x", "axb"] {
            assert!(size_of(Some(wrong)).is_err(), "{wrong}");
        }
    }
}
