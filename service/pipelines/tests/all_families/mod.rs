//! A small model of each family, of which tests ask the same of all families.
#![allow(dead_code)] // Each binary takes what it needs.

use std::path::{Path, PathBuf};

use pipelines::{Audio, AudioTask, Clip, Image, InitImage, MediaFormat, Medium, Request, Video};
use tempfile::TempDir;

use crate::numbers::fixtures;
use crate::open_model::copy;
use crate::tiny_ovi;

/// What writes a file into the folder of a model.
pub(crate) type Write = fn(&Path);

/// A model in a separate folder, and a request of it.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// Fixtures that are copied over each other: from, and where to.
    pub(crate) folders: &'static [(&'static str, &'static str)],
    pub(crate) request: fn() -> Request,
    /// The component that a precision changes.
    pub(crate) quantized: &'static str,
    /// The file that is opened, if it is not the folder, and what writes it.
    pub(crate) file: Option<(&'static str, Write)>,
}

pub(crate) const CASES: [Case; 13] = [
    Case {
        name: "flux",
        folders: &[("flux-tiny", "")],
        request: || of(Medium::Image(Image::of(64, 64))),
        quantized: "text_encoder_2",
        file: None,
    },
    Case {
        name: "kontext",
        folders: &[("flux-tiny", ""), ("flux-kontext-tiny", "")],
        request: || {
            of(Medium::Image(Image {
                references: vec![picture(64, 9)],
                ..Image::of(64, 64)
            }))
        },
        quantized: "text_encoder_2",
        file: None,
    },
    Case {
        name: "flux2",
        folders: &[("flux2-tiny", "")],
        request: || Request {
            guidance: 0.0,
            ..of(Medium::Image(Image {
                references: vec![picture(64, 9), picture(80, 5)],
                ..Image::of(64, 64)
            }))
        },
        quantized: "text_encoder",
        file: None,
    },
    Case {
        name: "z-image",
        folders: &[("z-image-tiny", ""), ("flux-tiny/vae", "vae")],
        request: || Request {
            guidance: 0.0,
            ..of(Medium::Image(Image::of(64, 64)))
        },
        quantized: "text_encoder",
        file: None,
    },
    Case {
        name: "sdxl",
        folders: &[("sdxl-tiny", "")],
        request: || Request {
            guidance: 0.0,
            negative_prompt: Some("a green hat".to_owned()),
            true_guidance: 3.0,
            ..of(Medium::Image(Image::of(64, 80)))
        },
        quantized: "text_encoder_2",
        file: None,
    },
    Case {
        name: "qwen-image",
        folders: &[("qwen-vl-tiny", ""), ("qwen-image-tiny", "")],
        request: || Request {
            guidance: 0.0,
            negative_prompt: Some(" ".to_owned()),
            true_guidance: 3.0,
            ..of(Medium::Image(Image::of(64, 64)))
        },
        quantized: "text_encoder",
        file: None,
    },
    Case {
        name: "qwen-image-edit",
        folders: &[("qwen-vl-tiny", ""), ("qwen-image-tiny", "")],
        request: || Request {
            guidance: 0.0,
            ..of(Medium::Image(Image {
                references: vec![picture(64, 9), picture(96, 5)],
                seen: vec![picture(64, 9), picture(96, 5)],
                ..Image::of(64, 64)
            }))
        },
        quantized: "text_encoder",
        file: Some(("", edits_pictures)),
    },
    Case {
        name: "framepack",
        folders: &[
            ("hunyuan-tiny", ""),
            ("flux-tiny/text_encoder", "text_encoder_2"),
            ("flux-tiny/tokenizer", "tokenizer_2"),
            ("framepack-tiny", ""),
        ],
        request: || {
            of(Medium::Video(Video {
                width: 64,
                height: 64,
                frames: 37,
                frames_per_second: 30.0,
                init_image: Some(picture(64, 9)),
                ..Video::default()
            }))
        },
        quantized: "text_encoder",
        file: None,
    },
    Case {
        name: "wan",
        folders: &[("wan-tiny", ""), ("wan-ti2v-tiny", "")],
        request: || with_negative(9),
        quantized: "text_encoder",
        file: None,
    },
    Case {
        name: "wan-two",
        folders: &[("wan-tiny", ""), ("wan-i2v-tiny", "")],
        request: || with_negative(5),
        quantized: "text_encoder",
        file: None,
    },
    Case {
        name: "ovi",
        folders: &[],
        request: || {
            let request = with_negative(5);
            let Medium::Video(video) = request.medium else {
                return request;
            };
            let video = Video {
                frames_per_second: 24.0,
                ..video
            };
            Request {
                medium: Medium::Video(video),
                ..request
            }
        },
        quantized: "text_encoder",
        file: Some((tiny_ovi::FILE, tiny_ovi::write)),
    },
    Case {
        name: "ace-step",
        folders: &[("ace-tiny", "")],
        request: || of(Medium::Audio(track(AudioTask::TextToMusic, None))),
        quantized: "text_encoder",
        file: None,
    },
    Case {
        name: "ace-step-cover",
        folders: &[("ace-tiny", "")],
        request: || Request {
            strength: 0.6,
            ..of(Medium::Audio(track(AudioTask::Cover, Some(8000))))
        },
        quantized: "text_encoder",
        file: None,
    },
];

/// Makes a pipeline of Qwen-Image one of Qwen-Image-Edit-2511.
fn edits_pictures(folder: &Path) {
    for (file, from, to) in [
        (
            "model_index.json",
            "QwenImagePipeline",
            "QwenImageEditPlusPipeline",
        ),
        (
            "transformer/config.json",
            r#""zero_cond_t": false"#,
            r#""zero_cond_t": true"#,
        ),
    ] {
        let path = folder.join(file);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{file}");
        std::fs::write(&path, text.replace(from, to)).unwrap();
    }
}

pub(crate) fn of(medium: Medium) -> Request {
    Request {
        prompt: "a small red cat".to_owned(),
        seed: 7,
        ..Request::of(medium, 2, 1.0, 64)
    }
}

/// A film of so many frames from a picture, under a negative prompt too.
fn with_negative(frames: u32) -> Request {
    let video = Video {
        width: 64,
        height: 64,
        frames,
        frames_per_second: 16.0,
        init_image: Some(picture(64, 9)),
        ..Video::default()
    };
    Request {
        guidance: 0.0,
        negative_prompt: Some("a green hat".to_owned()),
        true_guidance: 3.0,
        ..of(Medium::Video(video))
    }
}

pub(crate) fn picture(side: u32, shade: u8) -> InitImage {
    let pixels = (0..3 * side * side).map(|i| (i as u8).wrapping_mul(shade));
    InitImage {
        width: side,
        height: side,
        rgb: pixels.collect::<Vec<u8>>().into(),
    }
}

pub(crate) fn track(task: AudioTask, source: Option<u64>) -> Audio {
    let clip = |samples: u64| Clip {
        format: MediaFormat::Audio {
            samples_per_second: 8000,
            channels: 2,
            samples,
        },
        data: (0..4 * samples)
            .map(|i| (i % 251) as u8)
            .collect::<Vec<u8>>()
            .into(),
    };
    Audio {
        seconds: 1.0,
        init_audio: source.map(clip),
        task,
        ..Audio::default()
    }
}

impl Case {
    /// Its model in a folder of its own.
    pub(crate) fn folder(&self) -> TempDir {
        let folder = TempDir::new().unwrap();
        for (from, to) in self.folders {
            copy(&fixtures().join(from), &folder.path().join(to));
        }
        if let Some((_, write)) = self.file {
            write(folder.path());
        }
        folder
    }

    /// The path of the model in its folder.
    pub(crate) fn model_in(&self, folder: &TempDir) -> PathBuf {
        match self.file {
            Some((name, _)) => folder.path().join(name),
            None => folder.path().to_owned(),
        }
    }
}
