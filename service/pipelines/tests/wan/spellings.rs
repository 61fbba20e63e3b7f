//! The fixtures' tensors as other programs write them: in the names of Wan's authors.

use std::collections::HashMap;
use std::path::Path;

use candle_core::Tensor;
use pipelines::autoencoders::wan::diffusers_name_of_original;

use crate::numbers::json;

/// Tensors of a file.
pub(crate) type Tensors = HashMap<String, Tensor>;

/// The parts of names in `convert_wan_to_diffusers.py`: of the authors, and of diffusers.
const TRANSFORMER: [(&str, &str); 15] = [
    ("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
    ("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
    ("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
    ("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
    ("time_projection.1", "condition_embedder.time_proj"),
    ("head.head", "proj_out"),
    (".norm3.", ".norm2."),
    (".self_attn.", ".attn1."),
    (".cross_attn.", ".attn2."),
    (".q.", ".to_q."),
    (".k.", ".to_k."),
    (".v.", ".to_v."),
    (".o.", ".to_out.0."),
    (".ffn.0.", ".ffn.net.0.proj."),
    (".ffn.2.", ".ffn.net.2."),
];

/// The authors' name of a transformer's tensor.
pub(crate) fn authors_name(name: &str) -> String {
    if name == "scale_shift_table" {
        return "head.modulation".to_owned();
    }
    let mut name = name.replace("scale_shift_table", "modulation");
    for (authors, diffusers) in TRANSFORMER {
        name = name.replace(diffusers, authors);
    }
    name
}

/// The authors' name of a tensor of UMT5, as `convert_wan_to_diffusers.py` has them from `wan/modules/t5.py`.
pub(crate) fn authors_name_of_umt5(name: &str) -> String {
    const LAYERS: [(&str, &str); 11] = [
        ("encoder.block.", "blocks."),
        ("layer.0.layer_norm", "norm1"),
        (
            "layer.0.SelfAttention.relative_attention_bias",
            "pos_embedding.embedding",
        ),
        ("layer.0.SelfAttention", "attn"),
        ("layer.1.layer_norm", "norm2"),
        ("layer.1.DenseReluDense.wi_0", "ffn.gate.0"),
        ("layer.1.DenseReluDense.wi_1", "ffn.fc1"),
        ("layer.1.DenseReluDense.wo", "ffn.fc2"),
        ("encoder.final_layer_norm", "norm"),
        ("shared.", "token_embedding."),
        ("encoder.", ""),
    ];
    let mut name = name.to_owned();
    for (transformers, authors) in LAYERS {
        name = name.replace(transformers, authors);
    }
    name
}

/// Tensors under other names.
pub(crate) fn renamed(tensors: &Tensors, rename: impl Fn(&str) -> String) -> Tensors {
    let renamed = tensors.iter();
    renamed
        .map(|(name, tensor)| (rename(name), tensor.clone()))
        .collect()
}

/// Writes a file of safetensors.
pub(crate) fn write(tensors: &Tensors, path: &Path) {
    candle_core::safetensors::save(tensors, path).expect("a file");
}

/// The names of the tensors of an autoencoder in the authors' files, by their names in diffusers: of Wan 2.1 or of Wan 2.2.
pub(crate) fn authors_names_of_vae(version: &str) -> HashMap<String, String> {
    let of_authors: HashMap<String, HashMap<String, Vec<usize>>> = json("wan-vae-tiny/authors.json");
    let names = of_authors[version].keys();
    names
        .map(|name| (diffusers_name_of_original(name).expect("a name"), name.clone()))
        .collect()
}
