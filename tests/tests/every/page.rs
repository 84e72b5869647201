//! What `tests/c/every.c` must print: what docs/coverage.md says of each function.

use std::collections::BTreeMap;
use std::fs;

use virtio_kfd_tests::parts::package_path;

/// Functions that are done, but answer something else on gfx906, and why.
const OTHERWISE: [(&str, &str, &str); 6] = [
    ("hsaKmtRegisterMemory", "NOT_SUPPORTED", "memory of the application is not taken unless it asks for it"),
    ("hsaKmtRegisterMemoryToNodes", "NOT_SUPPORTED", "the same"),
    ("hsaKmtRegisterMemoryWithFlags", "NOT_SUPPORTED", "the same"),
    ("hsaKmtGetXNACKMode", "NOT_SUPPORTED", "gfx906 has none: KFD says EPERM"),
    ("hsaKmtSetXNACKMode", "NOT_SUPPORTED", "the same"),
    ("hsaKmtRuntimeEnable", "status 1", "there are queues by then: KFD says EEXIST"),
];

/// The same for loop-back alone.
const LOOPBACK: [(&str, &str, &str); 3] = [
    ("hsaKmtGetAmdGPUDeviceFd", "NOT_SUPPORTED", "there is no render node"),
    ("hsaKmtRegisterSharedHandle", "status 1", "there is one process, whose own handle it is"),
    ("hsaKmtRegisterSharedHandleToNodes", "status 1", "the same"),
];

/// The functions of docs/coverage.md on the list of 2026, in ROCr 7 or in its driver for virtio, and what they are to answer.
fn expected(loopback: bool) -> BTreeMap<String, String> {
    let page = fs::read_to_string(package_path("../docs/coverage.md")).unwrap();
    let mut found = BTreeMap::new();
    for line in page.lines().filter(|line| line.starts_with("| hsaKmt")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, name, _, _, _, exported, looked_up, driver, state, ..] = cells[..] else { panic!("{line}") };
        if [exported, looked_up].contains(&"yes") || !driver.is_empty() {
            found.insert(name.to_owned(), state.replace("done", "SUCCESS"));
        }
    }
    let besides = if loopback { LOOPBACK.as_slice() } else { &[] };
    for (name, answer, _) in OTHERWISE.iter().chain(besides) {
        assert_eq!(
            found.insert((*name).to_owned(), (*answer).to_owned()).as_deref(),
            Some("SUCCESS"),
            "{name}"
        );
    }
    found
}

/// Fails unless each function has answered what the page says, and nothing has been written beyond a struct.
#[track_caller]
pub fn check(output: &str, loopback: bool) {
    let answers: BTreeMap<String, String> = output
        .lines()
        .filter(|line| line.starts_with("hsaKmt"))
        .filter_map(|line| line.split_once(": "))
        .map(|(name, answer)| (name.to_owned(), answer.to_owned()))
        .collect();
    let expected = expected(loopback);
    assert_eq!(
        expected.len(),
        114,
        "109 of the list, four that only ROCr's loader knows, one that its driver calls"
    );
    for (name, answer) in &expected {
        assert_eq!(answers.get(name), Some(answer), "{name} in:\n{output}");
    }
    assert_eq!(answers.len(), expected.len(), "{output}");
    for line in [
        "packets processed: 1",
        "nothing came: 31, after the time: 1",
        "second cache at its place: 1",
        "link from the GPU to the CPU: 1",
        "AMD's model: 0",
        "read: across",
        "amdgpu_query_gpu_info: 0",
        "114 functions",
    ] {
        assert!(output.lines().any(|found| found == line), "{line:?} in:\n{output}");
    }
    let written = output.lines().filter(|line| line.contains("written to its end")).count();
    let fully = output.lines().filter(|line| line.ends_with("written to its end: 1")).count();
    assert!(written == fully && written >= 12, "{fully} of {written} in:\n{output}");
}
