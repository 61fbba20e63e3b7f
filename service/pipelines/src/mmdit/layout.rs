//! Names and shapes of the blocks' tensors in diffusers, and their places in a single file of their authors, which fuses
//! queries, keys, values and feed-forwards.

use super::shape::{BlocksShape, Design};
use crate::checkpoint::{Layout, Rows};

/// Names of one stream of a double block in a single file, after the prefix `double_blocks.N.`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamNames {
    /// Name of the modulator; `None` where all blocks share one.
    pub(crate) modulation: Option<&'static str>,
    /// Name of the layer of queries, keys and values in one.
    pub(crate) projections: &'static str,
    /// Names of the norms of queries and keys, with the tensors' suffix.
    pub(crate) norms: [&'static str; 2],
    pub(crate) output: &'static str,
    pub(crate) feed_forward: [&'static str; 2],
}

/// Names of a single block in a single file, after the prefix `single_blocks.N.`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SingleNames {
    /// As of [`StreamNames`].
    pub(crate) modulation: Option<&'static str>,
    pub(crate) norms: [&'static str; 2],
}

/// How an author's single files name the tensors of blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockNames {
    /// Names of the generated tokens' stream, then of the text's.
    pub(crate) streams: [StreamNames; 2],
    pub(crate) single: SingleNames,
}

/// Names of the two last layers of a single block where they are not one: over the attention, and over the feed-forward.
pub(super) const SPLIT_LAST: [&str; 2] = ["attn.to_out", "mlp_fc2"];

/// Names of one stream of a double block in diffusers.
pub(super) struct DiffusersStream {
    pub(super) modulation: &'static str,
    pub(super) projections: [&'static str; 3],
    pub(super) output: &'static str,
    pub(super) feed_forward: &'static str,
    pub(super) norms: [&'static str; 2],
}

/// The stream of the generated tokens, then that of the text: of FLUX and HunyuanVideo.
const STREAMS: [DiffusersStream; 2] = [
    DiffusersStream {
        modulation: "norm1.linear",
        projections: ["to_q", "to_k", "to_v"],
        output: "to_out.0",
        feed_forward: "ff",
        norms: ["norm_q", "norm_k"],
    },
    DiffusersStream {
        modulation: "norm1_context.linear",
        projections: ["add_q_proj", "add_k_proj", "add_v_proj"],
        output: "to_add_out",
        feed_forward: "ff_context",
        norms: ["norm_added_q", "norm_added_k"],
    },
];

/// Those of Qwen-Image.
const STREAMS_OF_QWEN_IMAGE: [DiffusersStream; 2] = {
    let [picture, text] = STREAMS;
    [
        DiffusersStream {
            modulation: "img_mod.1",
            feed_forward: "img_mlp",
            ..picture
        },
        DiffusersStream {
            modulation: "txt_mod.1",
            feed_forward: "txt_mlp",
            ..text
        },
    ]
};

impl Design {
    /// The stream of the generated tokens, then that of the text.
    pub(super) fn streams(self) -> &'static [DiffusersStream; 2] {
        match self {
            Design::Flux1 | Design::Flux2 => &STREAMS,
            Design::QwenImage => &STREAMS_OF_QWEN_IMAGE,
        }
    }
}

impl Layout {
    /// A layer of two parts, the last layer's modulation, whose parts are in the other order in single files.
    pub(crate) fn swapped(&mut self, name: &str, shape: &BlocksShape, theirs: &str) {
        let (width, before) = (shape.width(), self.0.len());
        self.of_block(shape, name, [2 * width, width], theirs, 0);
        for spec in &mut self.0[before..] {
            let swapped = [(width, width), (0, width)];
            spec.rows = swapped.map(|(first, count)| Rows { first, count }).to_vec();
        }
    }

    /// A layer of a block, with a bias where the design has biases.
    fn of_block(&mut self, shape: &BlocksShape, name: &str, sizes: [usize; 2], theirs: &str, first: usize) {
        match shape.design.has_biases() {
            true => self.linear(name, sizes, theirs, first),
            false => self.weight(name, sizes, theirs, first),
        }
    }

    /// All blocks of a design whose single files have diffusers' names.
    pub(crate) fn blocks_of_diffusers(&mut self, shape: &BlocksShape) {
        let width = shape.width();
        let (up, down) = ([shape.raised_width(), width], [width, shape.feed_forward_width()]);
        let [up_name, down_name] = shape.design.feed_forward();
        for i in 0..shape.double {
            let block = format!("transformer_blocks.{i}");
            for stream in shape.design.streams() {
                let projections = stream.projections.iter().chain([&stream.output]);
                let square = projections.map(|name| (format!("attn.{name}"), [width, width]));
                let layers = [
                    (stream.modulation.to_owned(), [6 * width, width]),
                    (format!("{}.{up_name}", stream.feed_forward), up),
                    (format!("{}.{down_name}", stream.feed_forward), down),
                ];
                for (name, sizes) in square.chain(layers) {
                    let name = format!("{block}.{name}");
                    self.of_block(shape, &name, sizes, &name, 0);
                }
                for norm in stream.norms {
                    self.same(&format!("{block}.attn.{norm}.weight"), &[shape.head]);
                }
            }
        }
    }

    /// All blocks.
    pub(crate) fn blocks(&mut self, shape: &BlocksShape, theirs: &BlockNames) {
        let (width, inner, raised) = (shape.width(), shape.feed_forward_width(), shape.raised_width());
        let [up_name, down_name] = shape.design.feed_forward();
        for i in 0..shape.double {
            let (block, file) = (format!("transformer_blocks.{i}"), format!("double_blocks.{i}"));
            for (stream, theirs) in shape.design.streams().iter().zip(&theirs.streams) {
                if let Some(name) = theirs.modulation {
                    let modulation = format!("{block}.{}", stream.modulation);
                    let in_file = format!("{file}.{name}");
                    self.linear(&modulation, [6 * width, width], &in_file, 0);
                }
                for (part, name) in stream.projections.iter().enumerate() {
                    self.of_block(
                        shape,
                        &format!("{block}.attn.{name}"),
                        [width, width],
                        &format!("{file}.{}", theirs.projections),
                        part * width,
                    );
                }
                let output = format!("{block}.attn.{}", stream.output);
                let in_file = format!("{file}.{}", theirs.output);
                self.of_block(shape, &output, [width, width], &in_file, 0);
                let feed_forward = format!("{block}.{}", stream.feed_forward);
                let [up, down] = theirs.feed_forward.map(|name| format!("{file}.{name}"));
                self.of_block(
                    shape,
                    &format!("{feed_forward}.{up_name}"),
                    [raised, width],
                    &up,
                    0,
                );
                self.of_block(
                    shape,
                    &format!("{feed_forward}.{down_name}"),
                    [width, inner],
                    &down,
                    0,
                );
                for (norm, in_file) in stream.norms.iter().zip(theirs.norms) {
                    let name = format!("{block}.attn.{norm}.weight");
                    self.rows(&name, vec![shape.head], &format!("{file}.{in_file}"), 0);
                }
            }
        }
        for i in 0..shape.single {
            let (block, file) = (
                format!("single_transformer_blocks.{i}"),
                format!("single_blocks.{i}"),
            );
            let [fused, last] = ["linear1", "linear2"].map(|name| format!("{file}.{name}"));
            let of_last = [width, width + inner];
            if let Some(name) = theirs.single.modulation {
                let (modulation, in_file) = (format!("{block}.norm.linear"), format!("{file}.{name}"));
                self.linear(&modulation, [3 * width, width], &in_file, 0);
            }
            match shape.design {
                Design::Flux1 | Design::QwenImage => {
                    for (part, name) in ["to_q", "to_k", "to_v"].iter().enumerate() {
                        self.linear(
                            &format!("{block}.attn.{name}"),
                            [width, width],
                            &fused,
                            part * width,
                        );
                    }
                    self.linear(&format!("{block}.proj_mlp"), [inner, width], &fused, 3 * width);
                    match shape.splits_last_layers {
                        false => self.linear(&format!("{block}.proj_out"), of_last, &last, 0),
                        true => {
                            let [attended, inner_out] = SPLIT_LAST.map(|name| format!("{block}.{name}"));
                            self.linear(&attended, [width, width], &attended, 0);
                            self.linear(&inner_out, [width, inner], &inner_out, 0);
                        }
                    }
                }
                Design::Flux2 => {
                    let name = format!("{block}.attn.to_qkv_mlp_proj");
                    self.of_block(shape, &name, [3 * width + raised, width], &fused, 0);
                    self.of_block(shape, &format!("{block}.attn.to_out"), of_last, &last, 0);
                }
            }
            for (norm, in_file) in ["norm_q", "norm_k"].iter().zip(theirs.single.norms) {
                let name = format!("{block}.attn.{norm}.weight");
                self.rows(&name, vec![shape.head], &format!("{file}.{in_file}"), 0);
            }
        }
    }
}
