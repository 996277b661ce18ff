/* Asks a SavedModel what to watch next, through TensorFlow's C API: client FOLDER HISTORY IDS SCORES ID ID ...
 *
 * Prints one line an answer: movie id and score, best first. HISTORY, IDS and SCORES are the tensors' names, such as
 * StatefulPartitionedCall_2:1, as `saved_model_cli show` gives them for the signature serving_default.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tensorflow/c/c_api.h"

static void check(TF_Status *status) {
  if (TF_GetCode(status) == TF_OK) return;
  fprintf(stderr, "client: %s\n", TF_Message(status));
  exit(1);
}

static TF_Output output(TF_Graph *graph, char *name) {
  char *colon = strrchr(name, ':');
  const int index = colon == NULL ? 0 : atoi(colon + 1);
  if (colon != NULL) *colon = 0;
  TF_Output found = {TF_GraphOperationByName(graph, name), index};
  if (found.oper != NULL) return found;
  fprintf(stderr, "client: the model has no operation %s\n", name);
  exit(1);
}

int main(int argc, char **argv) {
  if (argc < 5) {
    fprintf(stderr, "usage: client FOLDER HISTORY IDS SCORES [ID ...]\n");
    return 2;
  }
  TF_Status *status = TF_NewStatus();
  TF_Graph *graph = TF_NewGraph();
  TF_SessionOptions *options = TF_NewSessionOptions();
  const char *tags[] = {"serve"};
  TF_Session *session = TF_LoadSessionFromSavedModel(options, NULL, argv[1], tags, 1, graph, NULL, status);
  check(status);

  int64_t shape[] = {1, argc - 5};
  TF_Tensor *history = TF_AllocateTensor(TF_INT64, shape, 2, (argc - 5) * sizeof(int64_t));
  for (int i = 5; i < argc; ++i) ((int64_t *)TF_TensorData(history))[i - 5] = atoll(argv[i]);

  TF_Output input = output(graph, argv[2]);
  TF_Output answers[] = {output(graph, argv[3]), output(graph, argv[4])};
  TF_Tensor *values[2] = {NULL, NULL};
  TF_SessionRun(session, NULL, &input, &history, 1, answers, values, 2, NULL, 0, NULL, status);
  check(status);

  const int64_t *ids = TF_TensorData(values[0]);
  const float *scores = TF_TensorData(values[1]);
  for (int64_t i = 0; i < TF_Dim(values[0], 1); ++i) printf("%lld %.6f\n", (long long)ids[i], scores[i]);

  for (int i = 0; i < 2; ++i) TF_DeleteTensor(values[i]);
  TF_DeleteTensor(history);
  TF_CloseSession(session, status);
  TF_DeleteSession(session, status);
  TF_DeleteSessionOptions(options);
  TF_DeleteGraph(graph);
  TF_DeleteStatus(status);
  return 0;
}
