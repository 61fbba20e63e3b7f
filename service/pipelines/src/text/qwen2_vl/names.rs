//! Names of tensors in GGUF files of llama.cpp (architecture `qwen2vl`), whose queries and keys are not permuted.

use crate::checkpoint::numbered;

/// Layers of a block: in transformers and in llama.cpp.
const LAYERS: [(&str, &str); 9] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// The name in transformers of a tensor of a file, in transformers' names or in those of llama.cpp: each name shows whose it
/// is. `None` for the head of the language model, which is not read.
pub(super) fn transformers_name(name: &str) -> Option<String> {
    match name {
        "token_embd.weight" => return Some("model.embed_tokens.weight".to_owned()),
        "output_norm.weight" => return Some("model.norm.weight".to_owned()),
        "output.weight" | "lm_head.weight" => return None,
        _ => {}
    }
    let Some((number, rest)) = numbered(name, "blk.") else {
        return Some(name.to_owned());
    };
    LAYERS.iter().find_map(|(layer, theirs)| {
        let kind = rest.strip_prefix(theirs)?.strip_prefix('.')?;
        Some(format!("model.layers.{number}.{layer}.{kind}"))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::Qwen2VlConfig;
    use super::*;

    #[test]
    fn names_of_llama_cpp_lead_to_those_of_transformers() {
        let config = Qwen2VlConfig {
            num_hidden_layers: 2,
            ..Qwen2VlConfig::default()
        };
        let known: BTreeSet<String> = config
            .tensor_shapes(&|_| false)
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        let of_block = |block: usize| {
            let weights = LAYERS
                .iter()
                .map(move |(_, theirs)| format!("blk.{block}.{theirs}.weight"));
            let biases = ["q", "k", "v"].map(|part| format!("blk.{block}.attn_{part}.bias"));
            weights.chain(biases)
        };
        let outside = ["token_embd.weight", "output_norm.weight", "output.weight"].map(str::to_owned);
        let theirs = of_block(0).chain(of_block(1)).chain(outside);
        let found: BTreeSet<String> = theirs.filter_map(|name| transformers_name(&name)).collect();
        assert_eq!(found, known);
        for name in &known {
            assert_eq!(transformers_name(name).as_ref(), Some(name));
        }
    }
}
