//! What requests have in common: names of models, sizes, and fields of forms.

use std::collections::HashMap;
use std::str::FromStr;

use axum::extract::Multipart;
use bytes::Bytes;
use calls::ModelRef;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::errors::Failure;

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
    sides.ok_or_else(|| Failure::field("size", format!("{size:?} is no size: write 1024x1024, or auto")))
}

/// The fields of a form: texts by name, and files in their order.
#[derive(Debug, Default)]
pub(crate) struct Form {
    texts: HashMap<String, String>,
    files: Vec<(String, Bytes)>,
}

impl Form {
    /// Reads a form.
    ///
    /// # Errors
    /// Where it is broken off, or damaged.
    pub(crate) async fn read(mut multipart: Multipart) -> Result<Form, Failure> {
        let mut form = Form::default();
        while let Some(field) = multipart.next_field().await? {
            let name = field.name().unwrap_or_default().trim_end_matches("[]").to_owned();
            match field.file_name() {
                Some(_) => {
                    let data = field.bytes().await?;
                    form.files.push((name, data));
                }
                None => {
                    let text = field.text().await?;
                    form.texts.insert(name, text);
                }
            }
        }
        Ok(form)
    }

    /// A text; `None` where it is missing or empty.
    pub(crate) fn text(&mut self, name: &str) -> Option<String> {
        self.texts.remove(name).filter(|text| !text.trim().is_empty())
    }

    /// A value of a text.
    ///
    /// # Errors
    /// Where it is none.
    pub(crate) fn value<T: FromStr>(&mut self, name: &str) -> Result<Option<T>, Failure> {
        let Some(text) = self.text(name) else {
            return Ok(None);
        };
        let value = text.trim().parse();
        value.map(Some).map_err(|_| {
            Failure::field(
                name,
                format!("{text:?} is not a value of this field: /openapi.json says which it takes"),
            )
        })
    }

    /// One of some words.
    ///
    /// # Errors
    /// Where it is none of them.
    pub(crate) fn choice<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, Failure> {
        let value = self.text(name).map(|text| Value::String(text.trim().to_owned()));
        let value = value.map(serde_json::from_value).transpose();
        value.map_err(|problem| Failure::field(name, problem.to_string()))
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
