//! Short forms of entry keys for people: abbreviated commits.

/// Digits of a commit that are shown.
const COMMIT_DIGITS: usize = 8;

/// An entry's key, shorter: `me/mine@0123abcd+4-bit`.
pub(super) fn short_key(key: &str) -> String {
    let (name, formats) = key.split_at(key.rfind('+').unwrap_or(key.len()));
    match name.rsplit_once('@') {
        Some((id, revision)) => format!("{id}@{}{formats}", short_revision(revision)),
        None => key.to_owned(),
    }
}

/// The first digits of a commit; another revision unchanged.
pub(super) fn short_revision(revision: &str) -> &str {
    let is_commit = revision.len() == 40 && revision.bytes().all(|byte| byte.is_ascii_hexdigit());
    match is_commit {
        true => &revision[..COMMIT_DIGITS],
        false => revision,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_shown_with_a_short_commit() {
        let commit = "b28b7af69320201d1cf206ebf28373980add1451";
        assert_eq!(
            short_key(&format!("me/mine@{commit}+full")),
            "me/mine@b28b7af6+full"
        );
        for same in [
            "me/mine@main+transformer=nf4",
            "me/mine+text_encoder_2=int8,transformer=nf4",
            "me/mine",
            "small+full",
        ] {
            assert_eq!(short_key(same), same);
        }
    }
}
