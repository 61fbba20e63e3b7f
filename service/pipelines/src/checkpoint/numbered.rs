//! Numbers in the names of tensors.

/// The number of a layer and the rest of the name, of `{prefix}{number}.{rest}`.
pub(crate) fn numbered<'a>(name: &'a str, prefix: &str) -> Option<(usize, &'a str)> {
    let (number, rest) = name.strip_prefix(prefix)?.split_once('.')?;
    Some((number.parse().ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_layer_is_read_after_its_prefix() {
        assert_eq!(
            numbered("blocks.12.attn.weight", "blocks."),
            Some((12, "attn.weight"))
        );
        for other in ["block.12.attn", "blocks.x.attn", "blocks.12", "a.blocks.1.b"] {
            assert_eq!(numbered(other, "blocks."), None, "{other}");
        }
    }
}
