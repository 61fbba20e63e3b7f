//! The stage of a reference picture, of every autoencoder of pictures.

use model::Memo;
use model::plan::names;

use crate::{Image, InitImage, Medium, Request, StagePlan};

/// A stage that encodes a reference picture alone, once for all items of a request, made of the one that encodes a picture of this
/// size. It is remembered for requests with the same picture.
pub(super) fn reference_stage(
    name: &str,
    gives: &str,
    reference: &InitImage,
    encode: impl FnOnce(&Image) -> StagePlan,
) -> StagePlan {
    let size = Image::of(reference.width, reference.height);
    let read = Image {
        references: vec![reference.clone()],
        ..size.clone()
    };
    StagePlan {
        name: name.to_owned(),
        gives: names(&[gives]),
        per_item: false,
        memo: Some(Memo::of(Request::of(Medium::Image(read), 1, 0.0, 1))),
        ..encode(&size)
    }
}
