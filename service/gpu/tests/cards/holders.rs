//! Attribution of foreign memory to the driver's list of processes, without a GPU.

use gpu::{CardProcess, UNLISTED, UNSEEN, foreign_holders};
use proptest::prelude::*;
use residency::{Bytes, Holder};

const OWN: u32 = 100;

fn process(pid: u32, gib: impl Into<Option<u64>>) -> CardProcess {
    CardProcess {
        pid,
        bytes: gib.into().map(Bytes::gib),
    }
}

fn holder(name: &str, pid: impl Into<Option<u32>>, gib: u64) -> Holder {
    Holder {
        name: name.to_owned(),
        pid: pid.into(),
        bytes: Bytes::gib(gib),
    }
}

/// The process names of these tests.
fn name_of(pid: u32) -> Option<String> {
    match pid {
        7 => Some("blender".to_owned()),
        8 => Some("ollama".to_owned()),
        OWN => Some("moored".to_owned()),
        _ => None,
    }
}

fn holders(foreign_gib: u64, processes: &[CardProcess]) -> Vec<Holder> {
    foreign_holders(Bytes::gib(foreign_gib), processes, &[OWN], name_of)
}

#[test]
fn processes_are_named_with_their_bytes_and_the_largest_comes_first() {
    let listed = [process(7, 2), process(OWN, 30), process(8, 5)];
    assert_eq!(
        holders(7, &listed),
        [holder("ollama", 8, 5), holder("blender", 7, 2)]
    );
}

#[test]
fn bytes_beyond_the_listed_processes_have_one_unnamed_holder() {
    let listed = [process(OWN, 30), process(7, 2)];
    assert_eq!(
        holders(5, &listed),
        [holder(UNLISTED, None, 3), holder("blender", 7, 2)]
    );
    assert_eq!(holders(5, &[process(OWN, 30)]), [holder(UNLISTED, None, 5)]);
}

#[test]
fn a_list_without_our_process_is_of_another_namespace_and_names_no_process() {
    // In a container: the host's PIDs, of which 7 is an unrelated process here.
    assert_eq!(
        holders(5, &[process(7, 3), process(5321, 30)]),
        [holder(UNSEEN, None, 5)]
    );
    // In another container, or under WSL: no PIDs at all.
    assert_eq!(holders(5, &[]), [holder(UNSEEN, None, 5)]);
    // No process of ours has a context yet: nothing proves that the list is of our namespace.
    let unproven = foreign_holders(Bytes::gib(5), &[process(7, 5)], &[], name_of);
    assert_eq!(unproven, [holder(UNSEEN, None, 5)]);
}

#[test]
fn processes_of_unknown_size_share_the_remaining_bytes() {
    let one = [process(OWN, None), process(7, None)];
    assert_eq!(holders(5, &one), [holder("blender", 7, 5)]);
    let beside = [process(OWN, None), process(7, None), process(8, 4)];
    assert_eq!(
        holders(5, &beside),
        [holder("ollama", 8, 4), holder("blender", 7, 1)]
    );
    let two = [process(OWN, None), process(7, None), process(8, None)];
    assert_eq!(
        holders(5, &two),
        [holder("blender (pid 7), ollama (pid 8)", None, 5)]
    );
}

#[test]
fn a_process_that_computes_and_draws_is_listed_twice_and_counted_once() {
    let listed = [process(OWN, 30), process(7, 3), process(OWN, 30), process(7, 3)];
    assert_eq!(holders(3, &listed), [holder("blender", 7, 3)]);
}

#[test]
fn claims_beyond_the_foreign_bytes_are_scaled_down() {
    let listed = [process(OWN, 30), process(7, 8), process(8, 4)];
    assert_eq!(
        holders(6, &listed),
        [holder("blender", 7, 4), holder("ollama", 8, 2)]
    );
}

#[test]
fn a_process_that_has_ended_is_listed_by_pid() {
    assert_eq!(
        holders(1, &[process(OWN, 30), process(9, 1)]),
        [holder("a process", 9, 1)]
    );
}

#[test]
fn process_names_are_known_for_existing_pids_only() {
    assert!(gpu::process_name(std::process::id()).is_some_and(|name| !name.is_empty()));
    assert_eq!(gpu::process_name(u32::MAX), None);
}

proptest! {
    #[test]
    fn holders_sum_up_to_the_foreign_bytes_and_exclude_our_processes(
        foreign in any::<u64>(),
        listed in prop::collection::vec((0_u32..12, prop::option::of(any::<u64>())), 0..12),
        own in prop::collection::vec(0_u32..12, 0..3),
    ) {
        let processes: Vec<CardProcess> =
            listed.iter().map(|(pid, bytes)| CardProcess { pid: *pid, bytes: bytes.map(Bytes) }).collect();
        let found = foreign_holders(Bytes(foreign), &processes, &own, name_of);
        let sum: u128 = found.iter().map(|holder| u128::from(holder.bytes.0)).sum();
        prop_assert_eq!(sum, u128::from(foreign));
        prop_assert!(found.iter().all(|holder| holder.bytes > Bytes::ZERO));
        prop_assert!(found.iter().all(|holder| holder.pid.is_none_or(|pid| !own.contains(&pid))));
        prop_assert!(found.is_sorted_by(|a, b| a.bytes >= b.bytes));
        let trusted = processes.iter().any(|process| own.contains(&process.pid));
        prop_assert!(trusted || found.iter().all(|holder| holder.pid.is_none()));
        for holder in &found {
            let once = found.iter().filter(|other| other.pid == holder.pid && holder.pid.is_some()).count();
            prop_assert!(once <= 1, "{:?} twice", holder.pid);
        }
    }
}
