//! Short forms of entry keys for people: presets instead of formats, abbreviated commits.

use pipelines::Preset;

/// Digits of a commit that are shown.
const COMMIT_DIGITS: usize = 8;
/// Names of the text encoder that presets quantize.
const ENCODERS: [&str; 2] = ["text_encoder_2", "text_encoder"];

/// An entry's key, shorter: `me/mine@0123abcd+4-bit`.
pub(super) fn short_key(key: &str) -> String {
    let (name, formats) = match key.rsplit_once('+') {
        Some((name, formats)) => (name, Some(formats)),
        None => (key, None),
    };
    let name = match name.rsplit_once('@') {
        Some((id, revision)) => format!("{id}@{}", short_revision(revision)),
        None => name.to_owned(),
    };
    match formats {
        Some(formats) => format!("{name}+{}", preset_of(formats).unwrap_or(formats)),
        None => name,
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

/// The preset that stands for these formats.
fn preset_of(formats: &str) -> Option<&'static str> {
    Preset::ALL.into_iter().find_map(|preset| {
        let format = preset.format()?;
        let made = ENCODERS.map(|encoder| format!("{encoder}={format},transformer={format}"));
        made.iter().any(|made| made == formats).then_some(preset.as_str())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_shown_with_its_preset_and_a_short_commit() {
        let commit = "b28b7af69320201d1cf206ebf28373980add1451";
        assert_eq!(
            short_key(&format!("me/mine@{commit}+full")),
            "me/mine@b28b7af6+full"
        );
        assert_eq!(
            short_key("moored/demo+text_encoder_2=nf4,transformer=nf4"),
            "moored/demo+4-bit"
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
