//! What is heard, in a prompt: `<S>words that are spoken<E>`, which all variants read, and a caption of the other sounds, in one
//! of two spellings. Prompts with the spelling of another variant are turned into that of this one, as the authors do.

use super::variant::SoundCaption;

/// The caption in tags.
const TAGS: (&str, &str) = ("<AUDCAP>", "<ENDAUDCAP>");
/// The caption at the end of a prompt.
const LABEL: &str = "Audio:";

/// The prompt with its sound caption in the spelling that a variant reads.
pub fn in_spelling(prompt: &str, spelling: SoundCaption) -> String {
    match spelling {
        SoundCaption::Tagged => tagged(prompt),
        SoundCaption::Labelled => labelled(prompt),
    }
}

/// A text without its sound caption, and the caption, if there is one.
pub(super) fn parted(text: &str) -> (String, Option<String>) {
    match labelled(text).split_once(LABEL) {
        None => (text.to_owned(), None),
        Some((before, caption)) => (before.to_owned(), Some(caption.to_owned())),
    }
}

/// All after the first label, in tags. Space after the label is left out.
fn tagged(prompt: &str) -> String {
    match prompt.split_once(LABEL) {
        None => prompt.to_owned(),
        Some((before, caption)) => format!("{before}{}{}{}", TAGS.0, caption.trim_start(), TAGS.1),
    }
}

/// Each caption in tags after a label, in its place. An opening tag without a closing one stays.
fn labelled(prompt: &str) -> String {
    let mut written = String::with_capacity(prompt.len());
    let mut rest = prompt;
    while let Some((before, from)) = rest.split_once(TAGS.0) {
        let Some((caption, after)) = from.split_once(TAGS.1) else {
            break;
        };
        written.push_str(before);
        written.push_str(LABEL);
        written.push(' ');
        written.push_str(caption);
        rest = after;
    }
    written + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn captions_get_the_spelling_of_the_variant() {
        // By `re.sub` of the authors' formatters.
        for (prompt, as_tagged, as_labelled) in [
            ("A cat. <S>Hello<E>", "A cat. <S>Hello<E>", "A cat. <S>Hello<E>"),
            (
                "A cat. Audio:  rain\nand wind",
                "A cat. <AUDCAP>rain\nand wind<ENDAUDCAP>",
                "A cat. Audio:  rain\nand wind",
            ),
            (
                "A cat. <AUDCAP>rain\nand wind<ENDAUDCAP> End.",
                "A cat. <AUDCAP>rain\nand wind<ENDAUDCAP> End.",
                "A cat. Audio: rain\nand wind End.",
            ),
            (
                "<AUDCAP>a<ENDAUDCAP> and <AUDCAP>b<ENDAUDCAP>",
                "<AUDCAP>a<ENDAUDCAP> and <AUDCAP>b<ENDAUDCAP>",
                "Audio: a and Audio: b",
            ),
            ("<AUDCAP>open", "<AUDCAP>open", "<AUDCAP>open"),
            ("Audio:", "<AUDCAP><ENDAUDCAP>", "Audio:"),
        ] {
            assert_eq!(in_spelling(prompt, SoundCaption::Tagged), as_tagged);
            assert_eq!(in_spelling(prompt, SoundCaption::Labelled), as_labelled);
        }
    }
}
