//! Folders, models and requests to begin with.

use std::path::Path;

use pipelines::vision::qwen2_vl::size_of_area;
use pipelines::{Image, InitImage, Medium, Precision, Request, resized};
use tempfile::TempDir;

use crate::numbers::fixtures;
use crate::open_model::{OpenModel, copy};

/// The class of the pipeline that edits several pictures.
pub(crate) const EDIT_PLUS: &str = "QwenImageEditPlusPipeline";

/// A folder of the whole pipeline that a test may modify.
pub(crate) fn folder() -> TempDir {
    let folder = TempDir::new().expect("a folder");
    for name in ["qwen-vl-tiny", "qwen-image-tiny"] {
        copy(&fixtures().join(name), folder.path());
    }
    folder
}

/// The same with a text of a file replaced.
pub(crate) fn replace(folder: &TempDir, file: &str, from: &str, to: &str) {
    let path = folder.path().join(file);
    let text = std::fs::read_to_string(&path).expect("a file");
    assert!(text.contains(from), "{file}: {from}");
    std::fs::write(&path, text.replace(from, to)).expect("a file");
}

/// The pipeline of another class.
pub(crate) fn folder_of(class: &str) -> TempDir {
    let folder = folder();
    replace(&folder, "model_index.json", "QwenImagePipeline", class);
    folder
}

/// The pipeline that edits several pictures, with references at time 0 as in 2511.
pub(crate) fn folder_of_2511() -> TempDir {
    let folder = folder_of(EDIT_PLUS);
    replace(
        &folder,
        "transformer/config.json",
        r#""zero_cond_t": false"#,
        r#""zero_cond_t": true"#,
    );
    folder
}

/// A model of the family with all components resident.
pub(crate) fn open(path: &Path, precision: &Precision) -> OpenModel {
    OpenModel::open("qwen-image", path, precision)
}

/// A small request, with sides that are not confused with others.
pub(crate) fn request() -> Request {
    Request {
        prompt: "a red circle on a blue square".to_owned(),
        seed: 7,
        ..Request::of(Medium::Image(Image::of(80, 48)), 3, 0.0, 64)
    }
}

/// The same under a negative prompt.
pub(crate) fn guided() -> Request {
    Request {
        negative_prompt: Some("a small cat".to_owned()),
        true_guidance: 3.0,
        ..request()
    }
}

/// A picture of this size.
pub(crate) fn picture(width: u32, height: u32) -> InitImage {
    let rgb = (0..3 * width * height).map(|i| (i % 251) as u8);
    InitImage {
        width,
        height,
        rgb: rgb.collect(),
    }
}

/// The same request from a picture, with previews.
pub(crate) fn from_picture() -> Request {
    let image = Image {
        init_image: Some(picture(80, 48)),
        ..Image::of(80, 48)
    };
    Request {
        preview: true,
        steps: 5,
        strength: 0.8,
        medium: Medium::Image(image),
        ..request()
    }
}

/// Pictures in the size in which Edit-2509 and 2511 see them, scaled from these.
pub(crate) fn seen(pictures: &[InitImage]) -> Vec<InitImage> {
    let seen = |picture: &InitImage| {
        let from = (picture.width, picture.height);
        let size = size_of_area(from, 384 * 384);
        let whole = picture.rgb.len() == (3 * from.0 * from.1) as usize;
        InitImage {
            rgb: match whole {
                true => resized(&picture.rgb, 3, from, size).into(),
                false => Default::default(),
            },
            ..InitImage::of_size(size)
        }
    };
    pictures.iter().map(seen).collect()
}

/// The same request with two pictures that are edited.
pub(crate) fn with_references() -> Request {
    let references = vec![picture(64, 96), picture(96, 64)];
    let image = Image {
        seen: seen(&references),
        references,
        ..Image::of(80, 48)
    };
    Request {
        medium: Medium::Image(image),
        ..guided()
    }
}
