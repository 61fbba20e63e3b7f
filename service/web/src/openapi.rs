//! The OpenAPI document, made from the code.

use axum::Json;
use utoipa::openapi::OpenApi as Document;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::{Modify, OpenApi};

use crate::{health, images, metrics, models, music, page, sdapi, videos};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "moored",
        description = "Generates pictures, films and music on models that one service keeps in a card's memory. The form is that of OpenAI's \
                       API; fields beyond it are optional.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    paths(
        images::generate,
        images::options,
        images::edit,
        videos::create,
        videos::list,
        videos::one,
        videos::content,
        videos::delete,
        music::generate,
        models::list,
        models::one,
        metrics::scrape,
        sdapi::txt2img,
        sdapi::img2img,
        sdapi::options,
        sdapi::set_options,
        sdapi::models,
        sdapi::progress,
        sdapi::interrupt,
        sdapi::lists,
        page::index,
        page::asset,
        served,
        health::live,
        health::ready,
    ),
    modifiers(&Bearer),
    security(("token" = []), ())
)]
struct Api;

/// The token of a client, where the service asks for one.
struct Bearer;

impl Modify for Bearer {
    fn modify(&self, document: &mut Document) {
        let components = document.components.get_or_insert_default();
        let scheme = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        components.add_security_scheme("token", scheme);
    }
}

/// The OpenAPI document of the API over HTTP.
pub fn document() -> Document {
    Api::openapi()
}

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "health", responses((status = 200)))]
pub(crate) async fn served() -> Json<Document> {
    Json(document())
}
