// Package deploy tests the manifests beside it. It is a separate module because of Kubernetes' many types.
package deploy

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// jobSet has the fields of jobset.x-k8s.io/v1alpha2 that a manifest in this folder may use.
type jobSet struct {
	meta.TypeMeta `json:",inline"`
	Metadata      meta.ObjectMeta `json:"metadata"`
	Spec          struct {
		Network struct {
			EnableDNSHostnames       bool   `json:"enableDNSHostnames"`
			PublishNotReadyAddresses bool   `json:"publishNotReadyAddresses"`
			Subdomain                string `json:"subdomain"`
		} `json:"network"`
		FailurePolicy struct {
			MaxRestarts int32 `json:"maxRestarts"`
		} `json:"failurePolicy"`
		ReplicatedJobs []struct {
			Name     string                `json:"name"`
			Replicas int32                 `json:"replicas"`
			Template batch.JobTemplateSpec `json:"template"`
		} `json:"replicatedJobs"`
	} `json:"spec"`
}

// readJobSet reads the manifest and refuses unknown fields.
func readJobSet(t *testing.T) (set jobSet) {
	t.Helper()
	text, err := os.ReadFile("jobset.yaml")
	require.NoError(t, err)
	require.NoError(t, read(text, &set))
	return set
}

// read parses YAML as Kubernetes does: field names are case-sensitive and occur once.
func read(text []byte, set *jobSet) error {
	object, err := yaml.YAMLToJSONStrict(text)
	if err != nil {
		return err
	}
	unknown, err := json.UnmarshalStrict(object, set)
	return errors.Join(append(unknown, err)...)
}

// An unknown field, or a value of another type, is an error, so the test below detects them.
func TestStrict(t *testing.T) {
	text, err := os.ReadFile("jobset.yaml")
	require.NoError(t, err)
	for old, wrong := range map[string]string{
		"backoffLimit: 0":      "backOffLimit: 0",
		"maxRestarts: 3":       "maxRestarts: three",
		"subdomain: train":     "subDomain: train",
		"secretName: train":    "secret: train",
		"completions: 2":       "completions: \"2\"",
		"parallelism: 2":       "parallelism: 2\n          completions: 2",
		"restartPolicy: Never": "restartpolicy: Never",
	} {
		require.Contains(t, string(text), old)
		assert.Error(t, read([]byte(strings.Replace(string(text), old, wrong, 1)), new(jobSet)), wrong)
	}
}

// The JobSet manifest conforms to its schema and is consistent: pods, addresses, secret and restarts fit together.
func TestJobSet(t *testing.T) {
	set := readJobSet(t)
	assert.Equal(t, "jobset.x-k8s.io/v1alpha2", set.APIVersion)
	assert.Equal(t, "JobSet", set.Kind)
	assert.Empty(t, validation.IsDNS1035Label(set.Metadata.Name))
	assert.True(t, set.Spec.Network.EnableDNSHostnames)
	assert.True(t, set.Spec.Network.PublishNotReadyAddresses, "the others look for the first pod at once")
	assert.Empty(t, validation.IsDNS1123Subdomain(set.Spec.Network.Subdomain))
	assert.Positive(t, set.Spec.FailurePolicy.MaxRestarts)

	require.Len(t, set.Spec.ReplicatedJobs, 1)
	group := set.Spec.ReplicatedJobs[0]
	assert.EqualValues(t, 1, group.Replicas)
	job := group.Template.Spec
	require.NotNil(t, job.CompletionMode)
	assert.Equal(t, batch.IndexedCompletion, *job.CompletionMode)
	assert.Equal(t, *job.Completions, *job.Parallelism, "all pods run at once")
	assert.Zero(t, *job.BackoffLimit)
	pod := job.Template.Spec
	assert.Equal(t, core.RestartPolicyNever, pod.RestartPolicy)

	require.Len(t, pod.Containers, 1)
	c := pod.Containers[0]
	script := c.Command[2]
	assert.Contains(t, script, fmt.Sprintf("--machines %d ", *job.Completions))
	first := fmt.Sprintf("%s-%s-0-0.%s", set.Metadata.Name, group.Name, set.Spec.Network.Subdomain)
	assert.Contains(t, script, fmt.Sprintf("--join %s:%d ", first, c.Ports[0].ContainerPort))
	assert.Contains(t, script, fmt.Sprintf("--listen :%d ", c.Ports[0].ContainerPort))
	grace := regexp.MustCompile(`--grace (\d+)s`).FindStringSubmatch(script)
	require.NotNil(t, grace)
	graceSeconds, err := strconv.ParseInt(grace[1], 10, 64)
	require.NoError(t, err)
	assert.Less(t, graceSeconds, *pod.TerminationGracePeriodSeconds)

	require.Len(t, pod.Volumes, 1)
	volume := pod.Volumes[0]
	assert.Equal(t, volume.Name, c.VolumeMounts[0].Name)
	assert.EqualValues(t, 0o400, *volume.Secret.DefaultMode)
	assert.Contains(t, script, "--secret-file "+c.VolumeMounts[0].MountPath+"/secret ")
	text, err := os.ReadFile("jobset.yaml")
	require.NoError(t, err)
	assert.Contains(t, string(text), fmt.Sprintf("secret generic %s --from-literal=secret=", volume.Secret.SecretName))
}

// pods runs the commands of the pods in networks and with files as in Kubernetes: a service's names, and a secret
// behind a link.
const pods = `set -e
ip link set lo up
mount -t tmpfs tutti /mnt
echo "127.0.0.1 localhost train-workers-0-0.train" > /mnt/hosts
mount --bind /mnt/hosts /etc/hosts
mkdir -p /etc/tutti
mount -t tmpfs tutti /etc/tutti
mkdir /etc/tutti/..data
head -c 24 /dev/urandom | base64 > /etc/tutti/..data/secret
chmod 400 /etc/tutti/..data/secret
ln -s ..data/secret /etc/tutti/secret
JOB_COMPLETION_INDEX=1 "$@" > second 2>&1 & second=$!
JOB_COMPLETION_INDEX=0 "$@"
wait $second
cat second
`

// The pods' commands make one job.
func TestPods(t *testing.T) {
	if runtime.GOOS != "linux" || os.Geteuid() != 0 {
		t.Skip("needs namespaces of Linux, and a folder in /etc")
	}
	unshare := []string{"unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"}
	if out, err := exec.Command(unshare[0], append(unshare[1:], "mount -t tmpfs tutti /mnt && ip link set lo up")...).CombinedOutput(); err != nil {
		t.Skipf("needs namespaces and iproute2: %v: %s", err, out)
	}
	if _, err := os.Stat("/etc/tutti"); err != nil {
		t.Cleanup(func() { _ = os.Remove("/etc/tutti") })
	}
	dir := buildPrograms(t)
	c := readJobSet(t).Spec.ReplicatedJobs[0].Template.Spec.Template.Spec.Containers[0]
	words := slices.Concat(unshare[1:], []string{pods, "sh"}, c.Command, []string{filepath.Join(dir, "allreduce")})
	cmd := exec.CommandContext(t.Context(), unshare[0], words...)
	cmd.Dir = t.TempDir()
	cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	for rank := range 8 {
		assert.Contains(t, string(out), fmt.Sprintf("[%d] rank %d has [1 2 3.5]\n", rank, rank))
	}
}

// built builds the command and an example, once.
var built = sync.OnceValues(func() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "tutti-deploy-"); err != nil {
		return "", err
	}
	build := exec.Command("go", "build", "-o", dir+"/", "./cmd/tutti", "./examples/allreduce")
	build.Dir = ".."
	build.Env = append(os.Environ(), "GOWORK=", "GOFLAGS=")
	out, err := build.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, out)
	}
	return dir, err
})

// buildPrograms returns the folder that contains both.
func buildPrograms(t *testing.T) string {
	t.Helper()
	dir, err := built()
	require.NoError(t, err)
	return dir
}

func TestMain(m *testing.M) {
	code := m.Run()
	if dir, _ := built(); dir != "" {
		_ = os.RemoveAll(dir)
	}
	os.Exit(code)
}
