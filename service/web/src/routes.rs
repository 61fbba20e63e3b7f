//! The paths, with a row for each: who may call it, and what it takes.

use std::convert::Infallible;

use access::Role;
use axum::Router;
use axum::extract::{DefaultBodyLimit, FromRequestParts};
use axum::http::Uri;
use axum::http::request::Parts;
use axum::response::IntoResponse as _;
use axum::routing::{get, post};
use calls::{AskedOptions, Caller, Service};
use http::header::USER_AGENT;
use residency::Bytes;
use transport::{Body, Method, Needs, Protocol, Requests, Routes};

use crate::errors::Failure;
use crate::{health, images, mcp, metrics, models, music, page, sdapi, videos};

const OBSERVE: Needs = Needs::Role(Role::Observe);
const GENERATE: Needs = Needs::Role(Role::Generate);

/// Every path. A test holds it to the OpenAPI document.
#[rustfmt::skip] // a line each
pub(crate) const METHODS: &[Method] = &[
    Method::new("POST /v1/images/generations", GENERATE),
    Method::public("OPTIONS /v1/images/generations"),
    Method::new("POST /v1/images/edits", GENERATE).takes(Requests::Large),
    Method::new("POST /v1/videos", GENERATE).takes(Requests::Large),
    Method::new("GET /v1/videos", OBSERVE).spare(),
    Method::new("GET /v1/videos/{id}", OBSERVE).spare(),
    Method::new("GET /v1/videos/{id}/content", GENERATE),
    Method::new("DELETE /v1/videos/{id}", GENERATE).spare(),
    Method::new("POST /v1/music/generations", GENERATE),
    Method::new("GET /v1/models", OBSERVE),
    Method::new("GET /v1/models/{*model}", OBSERVE),
    Method::new("GET /metrics", OBSERVE).spare(),
    Method::new("POST /sdapi/v1/txt2img", GENERATE).asks_basic(),
    Method::new("POST /sdapi/v1/img2img", GENERATE).takes(Requests::Large).asks_basic(),
    Method::new("GET /sdapi/v1/options", OBSERVE).asks_basic(),
    Method::new("POST /sdapi/v1/options", GENERATE).asks_basic(),
    Method::new("GET /sdapi/v1/sd-models", OBSERVE).asks_basic(),
    Method::new("GET /sdapi/v1/progress", OBSERVE).spare().asks_basic(),
    Method::new("POST /sdapi/v1/interrupt", GENERATE).spare().asks_basic(),
    Method::new("GET /sdapi/v1/{list}", OBSERVE).asks_basic(),
    Method::new("POST /mcp", OBSERVE).takes(Requests::Large),
    Method::new("GET /mcp", OBSERVE),
    Method::new("DELETE /mcp", OBSERVE),
    Method::public("GET /"),
    Method::public("GET /assets/{file}"),
    Method::public("GET /openapi.json"),
    Method::public("GET /livez").spare(),
    Method::public("GET /readyz").spare(),
];

/// HTTP, as the transport knows it.
pub static PROTOCOL: Protocol = Protocol {
    name: "http",
    methods: METHODS,
    unknown: Method::new("", OBSERVE),
    answer: |refusal| Failure::from(refusal).into_response().map(Body::new),
    has_trailers: false,
};

/// The client of a request.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(crate) caller: Caller,
    /// Name in the list of jobs: that of the program, as it calls itself.
    pub(crate) name: String,
}

impl Client {
    /// Options of its jobs.
    pub(crate) fn options(&self) -> AskedOptions {
        AskedOptions {
            client_id: self.name.clone(),
            ..AskedOptions::default()
        }
    }
}

/// Most characters of a program's name.
const NAME_CHARACTERS: usize = 60;

impl<S: Sync> FromRequestParts<S> for Client {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Client, Infallible> {
        let agent = parts
            .headers
            .get(USER_AGENT)
            .and_then(|value| value.to_str().ok());
        let name = agent
            .and_then(|agent| agent.split_whitespace().next())
            .unwrap_or_default();
        Ok(Client {
            caller: transport::caller(&parts.extensions),
            name: name
                .chars()
                .filter(char::is_ascii_graphic)
                .take(NAME_CHARACTERS)
                .collect(),
        })
    }
}

/// The routes of HTTP. `longest`: the longest body.
pub fn routes(service: Service, longest: Bytes) -> Routes {
    let agents = mcp::endpoint(service.clone(), longest);
    let longest = usize::try_from(longest.0).unwrap_or(usize::MAX);
    let router = Router::new()
        .route(
            "/v1/images/generations",
            post(images::generate).options(images::options),
        )
        .route("/v1/images/edits", post(images::edit))
        .route("/v1/videos", post(videos::create).get(videos::list))
        .route("/v1/videos/{id}", get(videos::one).delete(videos::delete))
        .route("/v1/videos/{id}/content", get(videos::content))
        .route("/v1/music/generations", post(music::generate))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*model}", get(models::one))
        .route("/metrics", get(metrics::scrape))
        .merge(page::routes())
        .route_service("/mcp", agents)
        .route("/livez", get(health::live))
        .route("/readyz", get(health::ready))
        .with_state(service.clone())
        .merge(sdapi::routes(service))
        .fallback(async |uri: Uri| Failure::no_path(uri.path()))
        .method_not_allowed_fallback(async || Failure::no_verb())
        .layer(DefaultBodyLimit::max(longest));
    Routes::from(router)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::openapi;

    /// Every path of the document has a row, and every row is in the document.
    #[test]
    fn every_path_has_a_row() {
        let document = serde_json::to_value(openapi::document()).unwrap();
        let paths = document["paths"].as_object().unwrap();
        let told = paths.iter().flat_map(|(path, verbs)| {
            let verbs = verbs.as_object().unwrap().keys();
            verbs.map(move |verb| format!("{} {path}", verb.to_uppercase()))
        });
        // Messages of an agent's protocol are no part of the document.
        let rows = METHODS.iter().filter(|method| !method.path.ends_with(" /mcp"));
        let rows = rows.map(|method| method.path.replace("{*", "{"));
        assert_eq!(told.collect::<BTreeSet<_>>(), rows.collect::<BTreeSet<_>>());
    }

    /// Written by `cargo test -p web document -- --ignored`.
    #[test]
    fn the_document_is_that_of_the_code() {
        let written = include_str!("../../../docs/openapi.json");
        assert_eq!(written, text());
    }

    #[test]
    #[ignore = "writes the document"]
    fn write_the_document() {
        std::fs::write(
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json"),
            text(),
        )
        .unwrap();
    }

    fn text() -> String {
        serde_json::to_string_pretty(&openapi::document()).unwrap() + "\n"
    }
}
