//! Who holds memory of a card that is not ours, as far as it can be seen from here.

use residency::{Bytes, Holder};

/// A process that has a context on a card, as the driver lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CardProcess {
    /// Its id, in the namespace of whoever the driver thinks is asking.
    pub pid: u32,
    /// What it holds; under MIG and WSL the driver does not say.
    pub bytes: Option<Bytes>,
}

/// What others hold when the driver's list of processes cannot be read as ours.
pub const UNSEEN: &str = "other processes (their PIDs are not visible from here)";
/// What is left when every process that is listed has its share.
pub const UNLISTED: &str = "others that the driver does not list";

/// Divides `foreign`, what the driver shows as taken and is not ours, among the processes that it lists.
///
/// `own` are processes of ours that surely have a context on the card. A list in which none of them appears is of
/// another PID namespace (a container shows the host's PIDs, or none), where a number that happens to exist here
/// would name an innocent: then nobody is named. `name_of` looks a process up.
///
/// The holders' bytes add up to `foreign` exactly; the largest comes first.
pub fn foreign_holders(
    foreign: Bytes,
    processes: &[CardProcess],
    own: &[u32],
    name_of: impl Fn(u32) -> Option<String>,
) -> Vec<Holder> {
    if foreign == Bytes::ZERO {
        return Vec::new();
    }
    if !processes.iter().any(|process| own.contains(&process.pid)) {
        return vec![unnamed(UNSEEN, foreign)];
    }
    let name = |pid| name_of(pid).unwrap_or_else(|| "a process".to_owned());
    let others = merged(processes.iter().filter(|process| !own.contains(&process.pid)));
    let listed: u128 = others
        .iter()
        .filter_map(|process| process.bytes)
        .map(|bytes| u128::from(bytes.0))
        .sum();
    let mut holders: Vec<Holder> = others
        .iter()
        .filter_map(|process| {
            let bytes = scaled(process.bytes?, foreign, listed);
            (bytes > Bytes::ZERO).then(|| Holder {
                name: name(process.pid),
                pid: Some(process.pid),
                bytes,
            })
        })
        .collect();
    let rest = foreign - holders.iter().map(|holder| holder.bytes).sum();
    let silent: Vec<u32> = others
        .iter()
        .filter(|process| process.bytes.is_none())
        .map(|process| process.pid)
        .collect();
    if rest > Bytes::ZERO {
        // Rounding leaves a few bytes of a list that says more than there is: nobody's but theirs.
        let rounding = listed >= u128::from(foreign.0);
        match (silent.as_slice(), holders.first_mut()) {
            (_, Some(first)) if rounding => first.bytes += rest,
            ([], _) => holders.push(unnamed(UNLISTED, rest)),
            ([pid], _) => holders.push(Holder {
                name: name(*pid),
                pid: Some(*pid),
                bytes: rest,
            }),
            (several, _) => {
                let names: Vec<String> = several
                    .iter()
                    .map(|pid| format!("{} (pid {pid})", name(*pid)))
                    .collect();
                holders.push(unnamed(&names.join(", "), rest));
            }
        }
    }
    holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
    holders
}

/// The name of a process, as the kernel has it.
pub fn process_name(pid: u32) -> Option<String> {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

fn unnamed(name: &str, bytes: Bytes) -> Holder {
    Holder {
        name: name.to_owned(),
        pid: None,
        bytes,
    }
}

/// Each process once: one that computes and draws is listed twice with the same bytes.
fn merged<'a>(processes: impl Iterator<Item = &'a CardProcess>) -> Vec<CardProcess> {
    let mut once: Vec<CardProcess> = Vec::new();
    for process in processes {
        match once.iter_mut().find(|known| known.pid == process.pid) {
            Some(known) => known.bytes = known.bytes.max(process.bytes),
            None => once.push(*process),
        }
    }
    once.sort_by_key(|process| (std::cmp::Reverse(process.bytes), process.pid));
    once
}

/// A process's share where all of them together claim more than there is: the figures are of different moments.
fn scaled(bytes: Bytes, foreign: Bytes, listed: u128) -> Bytes {
    if listed <= u128::from(foreign.0) {
        return bytes;
    }
    let share = u128::from(bytes.0) * u128::from(foreign.0) / listed;
    Bytes(u64::try_from(share).unwrap_or(u64::MAX))
}
